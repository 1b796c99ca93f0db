# SPDX-License-Identifier: Apache-2.0
"""What parts of a step hand to later parts: on the devices, beside the parameters that they fetch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jzero.ir._rules import size_in_bytes
from jzero.sharding.cut._layer_parts import HOSTED, SENT, UNREAD, LayerLoop, LayerPart, Stretch
from jzero.tracing._types import Var


def handed_bytes(parts: Sequence[LayerPart], hosted: Collection[Var]) -> int:
    """The most bytes on a device between two parts, of what one made and a later one reads.

    Stacks that a loop makes count from its beginning to the end of their last reader.

    Args:
      parts: in the order in which they run.
      hosted: what leaves for the host as it is made, or waits there.
    """
    last = {var: i for i, part in enumerate(parts) for var in part.reads}
    alive: dict[Var, int] = {}
    most = 0
    for i, part in enumerate(parts):
        made = [v for v in _made(part) if v not in hosted and last.get(v, -1) > i]
        alive |= {v: size_in_bytes(v.aval) for v in made}
        most = max(most, sum(alive.values()))
        alive = {v: nbytes for v, nbytes in alive.items() if last[v] > i}
    return most


def _made(part: LayerPart) -> Sequence[Var]:
    if isinstance(part, Stretch):
        return part.gives
    if not isinstance(part, LayerLoop):
        return part.eqn.outvars
    pairs = zip(part.results[1], part.ys, strict=True)
    return [*part.results[0], *(y for y, kind in pairs if kind not in (HOSTED, SENT, UNREAD))]
