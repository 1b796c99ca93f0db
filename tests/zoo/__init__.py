"""Small realistic train steps, and what one device computes for several."""

from jzero._compare import to_host
from jzero.testing import Tolerance

from . import (
    calls,
    control,
    gradients,
    losses,
    networks,
    randomness,
    scripts_eqx,
    scripts_linen,
    scripts_nnx,
    scripts_nnx_toys,
    scripts_pmap,
    scripts_tokens,
    states,
)
from ._compare import assert_trees_close
from ._entry import FP32, NAMES, SCRIPTS, Entry, entry, get, on_shards
from ._models import BATCH_SIZE

__all__ = [
    "BATCH_SIZE",
    "FP32",
    "NAMES",
    "SCRIPTS",
    "Entry",
    "Tolerance",
    "assert_trees_close",
    "calls",
    "control",
    "entry",
    "get",
    "gradients",
    "losses",
    "networks",
    "on_shards",
    "randomness",
    "scripts_eqx",
    "scripts_linen",
    "scripts_nnx",
    "scripts_nnx_toys",
    "scripts_pmap",
    "scripts_tokens",
    "states",
    "to_host",
]
