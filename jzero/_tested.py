# SPDX-License-Identifier: Apache-2.0
"""The oldest and newest releases of JAX and related packages with which the tests have passed."""

import importlib.metadata

from jzero._errors import message

# Newer releases are not forbidden: most of them work, and an upper bound would hold back other packages.
# tests/test_tested.py compares this table with what is installed, and with the pages.
TESTED = {
    "jax": ("0.10.2", "0.12.0.1"),
    "jaxlib": ("0.10.2", "0.12.0.1"),
    "flax": ("0.12.8", "0.12.12"),
    "optax": ("0.2.8", "0.2.8"),
    "orbax-checkpoint": ("0.12.6", "0.12.8"),
}


def lacks_of_jax(error: Exception) -> ImportError:
    """The error for a JAX that lacks, or no longer has, what jzero uses of it."""
    oldest, newest = TESTED["jax"]
    found = importlib.metadata.version("jax")
    return ImportError(message(
        "import jzero", f"JAX {found} lacks what jzero uses of it ({error})",
        f"It uses internals that JAX may change; jzero is tested with JAX {oldest} to {newest}.",
        f"Install jax=={newest}, or a newer jzero."))  # fmt: skip
