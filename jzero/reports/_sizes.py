# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter by precision and optimizer; names of what lives within a step."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from jzero._numbers import BytesPerParam

GRADIENT, GATHERED, ACCUMULATOR = "gradient", "gathered parameter", "accumulator"
STREAMED_STATE, UPDATED = "streamed optimizer state", "updated parameter"
STREAMED_PARAMS, ACTIVATION = "streamed parameter", "activation"
SECOND_VERSION, TILE_BUFFERS = "second version", "tiles in transfer"
PARAM_BUFFERS = "parameters in transfer"
GATHERED_TILE, GRADIENT_TILE = "gathered tile", "tile of a gradient"


class RoleBytes(NamedTuple):
    parameters: Fraction  # as they are stored
    gradients: Fraction  # as the optimizer receives them
    optimizer_state: Fraction  # masters included
    compute: Fraction  # as a pass gathers parameters and reduces gradients
    # of the optimizer state; with masters the stored parameter is a copy that no update reads
    masters: Fraction


# By name: bytes of a parameter, of its gradient, of a float32 master, and of the parameter as passes use it.
# `tests/test_estimate.py` compares them with what optax's optimizers allocate.
PRECISIONS = {
    # ZeRO, section 3.1; Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    "mixed": (2, 2, 4, 2),  # 16-bit parameters, float32 masters (jzero.master_weights)
    "float32": (4, 4, 0, 4),
    "float32_masters": (4, 4, 0, 2),  # float32 parameters that the model casts to 16 bits
    "stochastic": (2, 2, 0, 2),  # bfloat16 parameters (jzero.stochastic_rounding)
}
# Bytes of state per parameter in float32, masters aside.
OPTIMIZERS = {
    "sgd": 0.0,
    "momentum": 4.0,  # one trace
    "adam": 8.0,  # two moments: Kingma and Ba, 2015, algorithm 1; with masters ZeRO's K = 12
    "adamw": 8.0,
    "lion": 4.0,  # one momentum: Chen et al., 2023, algorithm 2
    # Rows and columns only: Shazeer and Stern, 2018, section 3. 4/rows + 4/columns bytes, which is less
    # than this from 800 x 800 on; vectors, and dims below optax's min_dim_size_to_factor, have 4.
    "adafactor": 0.01,
    "muon": 4.0,  # one momentum: Jordan et al., 2024. Leaves that it leaves to Adam have 8.
}
# Means over rows and columns, products of whole matrices: no device can update its shard alone.
NEED_ALL_SHARDS = frozenset({"adafactor", "muon"})


def role_bytes(optimizer: str, precision: str, given: BytesPerParam) -> RoleBytes:
    """The sizes that the two names stand for, except where others are given."""
    params, grads, masters, compute = PRECISIONS[precision]
    stored = params if given.params is None else given.params
    state = masters + OPTIMIZERS[optimizer] if given.optimizer is None else given.optimizer
    sizes = (
        stored, grads if given.gradients is None else given.gradients, state,
        min(stored, compute), min(state, masters),
    )  # fmt: skip
    # Via text: 0.01 becomes a hundredth, not the nearest binary fraction.
    return RoleBytes(*(Fraction(str(n)) for n in sizes))


def transferred_gradients(sizes: RoleBytes) -> Fraction:
    """Bytes of a gradient of an offloaded step, which returns it before the update makes it wider.

    A loop over layers that casts float32 parameters stacks their gradients after the cast, in 4 bytes.
    """
    return min(sizes.gradients, sizes.compute)


def as_dtype(size: Fraction) -> str:
    """`16-bit`; for state, of all its leaves together."""
    return f"{float(8 * size):g}-bit"
