"""Whole training scripts, as their authors would write them: init, data, loop, metrics, evaluation."""

from . import eqx_, haiku_, keras_, linen, linen_rl, nnx_, plain
from ._program import PROGRAMS, Program

__all__ = ["PROGRAMS", "Program", "eqx_", "haiku_", "keras_", "linen", "linen_rl", "nnx_", "plain"]
