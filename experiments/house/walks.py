"""How far one thing walks through jzero's files, as Python calls them; prints JSON.

measure.py runs it as a process of its own, which imports the jzero of a checkout.
"""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from experiments.shared.devices import use_virtual_devices

PACKAGE = str(Path(jzero.__file__).parent)
WEIGHT = (64, 32)
# What the partitioner calls once for each equation, as `eqn`; and for each sum that it scatters, of `x`.
HANDLES = "partition/_run.py", "_equation"
SCATTERS = "partition/_writer.py", "_scatter"


class Walk:
    """The calls and returns of jzero's functions while it is the profiler.

    Attributes:
      events: (file, function, file of the jzero function it returns to; None for a call).
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, str, str | None]] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return") and _is_named(frame):
            caller = _caller(frame)
            if event == "call":
                self.events.append((frame.f_code.co_filename, frame.f_code.co_name, None))
            elif caller is not None:
                file, name = frame.f_code.co_filename, frame.f_code.co_name
                self.events.append((file, name, caller.f_code.co_filename))

    def numbers(self) -> dict[str, int]:
        """What a reader follows: each function once, however often it is called."""
        calls = {(file, name) for file, name, into in self.events if into is None}
        returns = {x for x in self.events if x[2] not in (None, x[0])}
        depths = itertools.accumulate(1 if into is None else -1 for _, _, into in self.events)
        return {
            "files entered": len({file for file, _ in calls}),
            "returns into another file": len(returns),
            "names called": len({name for _, name in calls}),
            "calls": sum(into is None for _, _, into in self.events),
            "deepest": max(depths),
        }


class UntilDonated(Walk):
    """Ends where an array is given away: the compiled program was called."""

    def __init__(self, donated: jax.Array) -> None:
        super().__init__()
        self._donated = donated

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._donated.is_deleted():
            sys.setprofile(None)
        else:
            super().__call__(frame, event, arg)


class OfGradient(Walk):
    """The handling of two equations: the latest, and the last before it of the weight's shape.

    The one makes the gradient, the other is the first of the update to read it: it is reduced then. What
    lies between them has nothing to do with the gradient.

    Attributes:
      found: the numbers up to where the gradient is reduced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, str, str | None]] = []
        self.found: list[dict[str, int]] = []
        self._makes = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and _is(frame, SCATTERS) and _is_weight(frame.f_locals["x"].aval):
            self.found.append(self.numbers())
        if event == "call" and _is(frame, HANDLES):
            eqn = frame.f_locals["eqn"]
            if self._makes:
                self.made = self.events
            self._makes = _is_weight(eqn.outvars[0].aval)
            self.events = []
        super().__call__(frame, event, arg)

    def numbers(self) -> dict[str, int]:
        self.events = self.made + self.events
        return super().numbers()


def _is_weight(x: Any) -> bool:
    return x.shape == WEIGHT


def _is(frame: FrameType, place: tuple[str, str]) -> bool:
    """Whether it is a function of that file and name."""
    file, name = place
    return frame.f_code.co_name == name and frame.f_code.co_filename.endswith(file)


def _is_named(frame: FrameType) -> bool:
    """Whether it is a function of jzero, and not a comprehension."""
    name = frame.f_code.co_name
    return frame.f_code.co_filename.startswith(PACKAGE) and (name == "<lambda>" or name[0] != "<")


def _caller(frame: FrameType) -> FrameType | None:
    """The nearest function of jzero below it on the stack."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
        caller = caller.f_back
    return caller


# -- the walks -------------------------------------------------------------------------------------

TX = optax.adamw(1e-3)


def init() -> Any:
    params = {"w": jnp.ones(WEIGHT)}
    return {"params": params, "opt_state": TX.init(params)}


def step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> jax.Array:
        # The weight on the left: its gradient is then one product, which nothing transposes.
        y = params["w"] @ batch["x"].T
        return jnp.mean((y.T - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, {"loss": loss}


def sharded(memory: Any = None) -> tuple[Any, Any, Any]:
    """The step, its state and a batch; it has run, and so is warm."""
    mesh = jax.make_mesh((8,), ("data",))
    train_step = jzero.shard_train_step(
        step, stage=3, memory=memory, axes=jzero.Axes(min_shard_bytes=0), mesh=mesh
    )
    batch = {"x": np.ones((16, WEIGHT[1]), np.float32), "y": np.ones((16, WEIGHT[0]), np.float32)}
    state = train_step.init(init)
    for _ in range(3):
        state, _ = train_step(state, batch)
    return train_step, jax.block_until_ready(state), batch


def arguments() -> dict[str, int]:
    """One warm call, up to the call of the compiled program."""
    train_step, state, batch = sharded()
    walk = UntilDonated(state["params"]["w"])
    profiled(walk, lambda: train_step(state, batch))
    return walk.numbers()


def gradient() -> dict[str, int]:
    """From the equation that makes the weight's gradient to the `psum_scatter` of it, as it is written."""
    train_step, state, batch = sharded()
    walk = OfGradient()
    fresh = jzero.shard_train_step(
        step, stage=3, axes=jzero.Axes(min_shard_bytes=0), mesh=train_step.mesh
    )
    profiled(walk, lambda: fresh.lower(state, batch))
    assert walk.found, f"the partitioner calls no {HANDLES} and {SCATTERS}"
    return walk.found[0]


def hosted() -> dict[str, int]:
    """One warm call whose update the host does."""
    train_step, state, batch = sharded(memory=jzero.HostCPU())
    walk = Walk()
    profiled(walk, lambda: train_step(state, batch))
    return walk.numbers()


def in_files() -> dict[str, int]:
    """One warm call whose optimizer state is in files."""
    with tempfile.TemporaryDirectory() as folder:
        train_step, state, batch = sharded(memory=jzero.NVMe(f"{folder}/state"))
        walk = Walk()
        profiled(walk, lambda: train_step(state, batch))
    return walk.numbers()


def profiled(walk: Walk, run: Callable[[], Any]) -> None:
    sys.setprofile(walk)
    try:
        run()
    finally:
        sys.setprofile(None)


if __name__ == "__main__":
    use_virtual_devices(8)
    walks = {
        "a call's arguments": arguments, "one gradient": gradient, "a hosted step": hosted,
        "a step in files": in_files,
    }  # fmt: skip
    print(json.dumps({name: walk() for name, walk in walks.items()}))
