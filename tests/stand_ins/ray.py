"""Stands in for Ray: an actor is a process on this machine. It has what ray_launch.py calls, no more."""

import atexit
import multiprocessing
import types
from typing import Any

_forked = multiprocessing.get_context("fork")
util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")


def init(runtime_env: dict[str, Any]) -> None:
    assert set(runtime_env) == {"working_dir"}


def remote(*, num_gpus: float) -> Any:
    assert num_gpus > 0
    return lambda cls: types.SimpleNamespace(remote=lambda: _Actor(cls))


def get(results: Any) -> Any:
    return [get(result) for result in results] if isinstance(results, list) else results()


class _Actor:
    def __init__(self, cls: type):
        self._pipe, theirs = _forked.Pipe()
        process = _forked.Process(target=_serve, args=(cls(), theirs))
        process.start()
        atexit.register(process.kill)  # JAX catches the SIGTERM of daemons.

    def __getattr__(self, method: str) -> Any:
        def call(*args: Any) -> Any:
            self._pipe.send((method, args))
            return self._pipe.recv

        return types.SimpleNamespace(remote=call)


def _serve(actor: Any, pipe: Any) -> None:
    while True:
        method, args = pipe.recv()
        pipe.send(getattr(actor, method)(*args))
