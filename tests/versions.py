"""Prints which releases run: `python tests/versions.py`; pytest does so at its end."""

import importlib.metadata
import platform

NAMES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint"


def line() -> str:
    """Python's version, and those of JAX and what stands on it."""
    versions = [f"{name} {importlib.metadata.version(name)}" for name in NAMES]
    return f"python {platform.python_version()}, {', '.join(versions)}"


if __name__ == "__main__":
    print(line(), flush=True)
