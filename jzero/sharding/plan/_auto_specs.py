# SPDX-License-Identifier: Apache-2.0
"""`auto_specs`: how each leaf is sharded over Auto axes, by the first pattern found in its path."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from jzero._errors import OptionError, message
from jzero.sharding.plan._stored_layout import Automatic
from jzero.tracing import _call

AutoSpecs = Sequence[tuple[str, P]]  # patterns and specs, in the order in which they are tried

# [Note: placeholders]
# One pattern is for a parameter and its optimizer state, which has other shapes too: a factored moment has
# fewer dims, and where optax.adafactor keeps no moment it has a leaf of shape [1]. A dim of size 1 is such a
# placeholder's if the leaf's last key is that of another leaf which is cut as its spec says; no larger dim is
# left out (test_tensor_axes.py::test_placeholders_of_optimizer_state_rest_as_they_can).


class AutoPlace(NamedTuple):
    automatic: Automatic = ()
    uncut: str = ""  # why it is not stored as its spec says


def places(
    who: str, auto_specs: AutoSpecs, paths: Sequence[str], shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int], data_axes: Sequence[str],
) -> list[AutoPlace]:  # fmt: skip
    """How each leaf is stored over the Auto axes, whose names and sizes are `sizes`."""
    rule = f"auto_specs are for mesh axes beside the data axes ({dict(sizes)})"
    _check_axes(who, auto_specs, sizes, data_axes, rule)
    firsts = [_first(auto_specs, path) for path in paths]
    fitting = {
        _last_key(path)
        for path, shape, pattern in zip(paths, shapes, firsts, strict=True)
        if pattern is not None and _fits(dict(auto_specs)[pattern], shape, sizes)
    }
    found: list[AutoPlace] = []
    bad: list[str] = []
    for path, shape, pattern in zip(paths, shapes, firsts, strict=True):
        if pattern is None:
            found.append(AutoPlace())
            continue
        place, misfits = _place(dict(auto_specs)[pattern], shape, sizes, _last_key(path) in fitting)
        found.append(place)
        bad += [f"{path}: {each}" for each in misfits]
    some = f"leaves are {', '.join(paths[:4])}, ..."
    if bad:
        root = re.escape(re.split(r"(?<=.)(?=\[')|(?<=\])(?=\.)", paths[0])[0])
        raise OptionError(message(
            who, bad, f"{rule}, whose sizes must divide the dims.",
            f"Correct them; {some} A pattern is found anywhere in a path: begin it with ^{root} to mean no "
            "other part of the state."))  # fmt: skip
    cut = [path for path, place in zip(paths, found, strict=True) if place.automatic]
    unused = [p for p, spec in auto_specs if len(spec) and not any(re.search(p, x) for x in cut)]
    if unused:
        why = [_why_unused(auto_specs, pattern, paths, firsts) for pattern in unused]
        raise OptionError(message(who, why, f"{rule}.", f"Correct them; {some}", things="patterns"))
    return found


def _check_axes(
    who: str, auto_specs: AutoSpecs, sizes: Mapping[str, int], data_axes: Sequence[str], rule: str
) -> None:
    bad = []
    for pattern, spec in auto_specs:
        names = [axis for entry in spec for axis in _call.spec_axes(entry) if axis not in sizes]
        for axis in names[:1]:
            why = "is a data axis" if axis in data_axes else "is no axis of the mesh"
            bad.append(f"auto_specs[{pattern!r}] is {spec}, and {axis!r} {why}")
    if bad:
        raise OptionError(message(
            who, bad, f"{rule}; over data axes ZeRO shards by itself, along another dim.",
            "Name axes that Axes(batch=) leaves out.", things="patterns"))  # fmt: skip


def _first(auto_specs: AutoSpecs, path: str) -> str | None:
    return next((pattern for pattern, _ in auto_specs if re.search(pattern, path)), None)


def _last_key(path: str) -> str:
    """`['w']` of `state[0]['layer']['w']`: optimizer state has the keys of its parameters."""
    return re.split(r"(?=[.\[])", path)[-1]


def _parts(entry: Any, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in _call.spec_axes(entry))


def _fits(spec: P, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    return len(spec) <= len(shape) and not any(
        size % _parts(entry, sizes) for entry, size in zip(spec, shape, strict=False)
    )


def _place(
    spec: P, shape: Sequence[int], sizes: Mapping[str, int], has_like: bool
) -> tuple[AutoPlace, list[str]]:
    """How a leaf is stored, and the dims that the axes do not divide. [Note: placeholders]."""
    if len(spec) > len(shape):  # A count of steps is no moment.
        return AutoPlace((), f"it has fewer dims than {spec}" if shape else ""), []
    entries = [_call.spec_axes(entry) for entry in spec]
    misfits = [d for d, axes in enumerate(entries) if shape[d] % _parts(axes, sizes)]
    if not misfits:
        return AutoPlace(tuple(entries)), []
    if not has_like or any(shape[d] != 1 for d in misfits):
        return AutoPlace(), [f"dim {d} of size {shape[d]} over {entries[d]}" for d in misfits]
    kept = [() if d in misfits else axes for d, axes in enumerate(entries)]
    automatic = tuple(kept) if any(kept) else ()
    return AutoPlace(automatic, f"it has a dim of size 1 where {spec} cuts"), []


def _why_unused(
    auto_specs: AutoSpecs, pattern: str, paths: Sequence[str], firsts: Sequence[str | None]
) -> str:
    matched = [i for i, path in enumerate(paths) if re.search(pattern, path)]
    if not matched:
        return f"auto_specs has {[pattern]}, which fit no leaf"
    own = [paths[i] for i in matched if firsts[i] == pattern]
    if own:
        spec = dict(auto_specs)[pattern]
        return (
            f"auto_specs[{pattern!r}] is {spec}, too long for every leaf that it matches ({own[0]})"
        )
    earlier = firsts[matched[0]]
    return (
        f"auto_specs[{pattern!r}] counts for no leaf: {earlier!r} stands before it, is found in "
        f"{paths[matched[0]]}, too, and its spec does not fit"
    )
