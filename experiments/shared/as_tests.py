"""Imported before JAX for what it does: the tests' settings in the environment, their folder on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
import conftest  # noqa: F401
