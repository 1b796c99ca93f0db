# SPDX-License-Identifier: Apache-2.0
"""Bytes per parameter of each role, by precision and by optimizer: two small tables, with sources.

`tests/test_estimate.py` holds them against what optax's optimizers allocate.
"""

from __future__ import annotations

from typing import NamedTuple


class Precision(NamedTuple):
    """How parameters are stored and computed with, in bytes per parameter.

    Attributes:
      parameters: as they are stored.
      gradients: as the optimizer receives them.
      masters: full-precision copies in the optimizer's state.
      compute: as the passes gather parameters and reduce gradients.
      what: in words.
    """

    parameters: float
    gradients: float
    masters: float
    compute: float
    what: str


PRECISIONS = {
    # ZeRO, section 3.1; Micikevicius et al., "Mixed Precision Training", 2018, section 3.1.
    "mixed": Precision(2, 2, 4, 2, "16-bit parameters, float32 masters (jzero.master_weights)"),
    "float32": Precision(4, 4, 0, 4, "float32 throughout"),
    "float32_masters": Precision(4, 4, 0, 2, "float32 parameters that the model casts to 16 bits"),
    "stochastic": Precision(2, 2, 0, 2, "bfloat16 parameters (jzero.stochastic_rounding)"),
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
