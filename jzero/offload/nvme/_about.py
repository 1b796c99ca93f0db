# SPDX-License-Identifier: Apache-2.0
"""What a file of tiles says that it is, and errors for a file that is something else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jzero import _json
from jzero._errors import StateError, message
from jzero._json import Malformed, Maybe
from jzero.offload.nvme._tile_layout import WHO, TileLayout

NOT_OVERWRITTEN = "Nothing was overwritten."
_TILES = [[[(str, int, bool)]]]
_ANY = (dict, list, str, int, float, bool, type(None))
_FORM = {"identity": _ANY, "tiles": _TILES, "frozen": bool, "gradients": Maybe(_TILES)}


class FileSpec(NamedTuple):
    layout: TileLayout
    # Whose state it is, as JSON: leaves, mesh, device; a file with another one is refused.
    identity: Any
    frozen: bool = False  # whether its tiles are written once, and belong to every step
    # That wait for each tile's update; no tiles if none wait in files.
    gradients: TileLayout = TileLayout(())

    def about(self) -> bytes:
        about = {"identity": self.identity, "tiles": _as_json(self.layout), "frozen": self.frozen}
        if self.gradients.num_tiles:
            about["gradients"] = _as_json(self.gradients)
        return json.dumps(about, sort_keys=True).encode()


def _as_json(layout: TileLayout) -> list[Any]:
    return [[list(extent) for extent in tile] for tile in layout.tiles]


def parsed(text: bytes) -> Any:
    """What `FileSpec.about` has written, checked: a right checksum does not authenticate."""
    about = _json.parse(text)
    if bad := _json.check(about, _FORM):
        raise Malformed(*bad)
    for extent in _extents(about):
        if [type(x) for x in extent] != [str, int, int, int, bool]:
            raise Malformed(f"{_json.shown(extent)} is no part of a leaf in a tile")
    return about


def listed(found: Sequence[Any]) -> str:
    """Some of what is wrong with a header or a description, for a message."""
    return "; ".join(map(str, found[:3])) + f", and {len(found) - 3} more" * (len(found) > 3)


def other_state(path: Path, there: Any, here: Any) -> StateError:
    """The error for a file that is `there` where `here` was expected, both as in `about`."""
    alike = all(there[key] == here[key] for key in ("identity", "frozen"))
    if alike and {x[0] for x in _extents(there)} == {x[0] for x in _extents(here)}:
        return _other_tiles(path, there, here)
    return StateError(message(
        WHO, f"{path} has another state: {difference(there, here)}",
        f"Leaves, mesh and devices of state that is resumed are those that it had. {NOT_OVERWRITTEN}",
        "Use another path, or restore a checkpoint, which any mesh can."))  # fmt: skip


def _extents(about: Any) -> list[Any]:
    return [extent for tile in about["tiles"] for extent in tile]


def _other_tiles(path: Path, there: Any, here: Any) -> StateError:
    def said(about: Any) -> str:
        ends = [x[2] + x[3] for x in _extents(about)]
        return f"up to {max(ends, default=0)} bytes, with{'' if 'gradients' in about else 'out'} gradients"

    return StateError(message(
        WHO, f"{path} has this state in tiles of {said(there)}; here they are of {said(here)}",
        f"host_bytes and gradients say how state is cut into tiles. {NOT_OVERWRITTEN}",
        "Use those of the run that made it, or restore a checkpoint into another path."))  # fmt: skip


def difference(there: Any, here: Any, path: str = "") -> str:
    """Where two JSON values differ first, in words."""
    if isinstance(there, dict) and isinstance(here, dict) and there.keys() == here.keys():
        pairs = [(f"{path}.{key}".lstrip("."), there[key], here[key]) for key in there]
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        pairs = [(f"{path}[{i}]", *both) for i, both in enumerate(zip(there, here, strict=True))]
    else:
        return f"{path} is {_short(there)} there, and {_short(here)} here"
    return next(difference(x, y, name) for name, x, y in pairs if x != y)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
