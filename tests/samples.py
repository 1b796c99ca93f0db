"""Samples of the tests, where all of them would take too long: `python tests/samples.py flags -n 2`.

Of each its files, and what is in the environment; further arguments are pytest's. `make test` and
`make test-newest` run all files, with the oldest and the newest JAX.
"""

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator

# What is to become JAX's default; a release without one of them ignores it.
UPGRADE_FLAGS = (
    "jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_remat_barrier_no_cotangents",
)  # fmt: skip
FILES = {
    # A release between the two: what NumPy's views keep, what donation deletes, and all messages.
    "release": ("calls", "checkpoint", "messages", "offload", "state_arguments", "zoo"),
    # What traces jax.checkpoint and derivatives of users' own.
    "flags": ("accumulate", "activations", "expansions", "zoo"),
}
ENVIRONMENT = {"release": {}, "flags": {name.upper(): "1" for name in UPGRADE_FLAGS}}


@contextlib.contextmanager
def switched_on(*names: str) -> Iterator[None]:
    """These flags on; each is a part of the keys of JAX's caches. Skips a test where JAX lacks one."""
    import jax

    if lacks := [name for name in names if not hasattr(jax.config, name)]:
        import pytest

        pytest.skip(f"JAX {jax.__version__} has no {', '.join(lacks)}")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def paths(name: str) -> list[str]:
    """The files of a sample."""
    return [str(pathlib.Path(__file__).with_name(f"test_{file}.py")) for file in FILES[name]]


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    os.environ |= ENVIRONMENT[name]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments, *paths(name)])
