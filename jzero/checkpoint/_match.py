# SPDX-License-Identifier: Apache-2.0
"""Which leaf of a checkpoint becomes which leaf of a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jzero._errors import CheckpointError, describe_leaf, message


class Leaf(NamedTuple):
    """A leaf as it is stored, or is to be restored; `path` is its name in messages."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Origin(NamedTuple):
    """The stored leaf that a leaf is restored from; `cast`: to fewer bits."""

    name: str
    cast: bool = False


def leaf_names(tree: Any) -> list[str]:
    """The name of each leaf in a checkpoint: `opt_state/0/mu/w`; a tree that is one array is `state`."""
    return [name_at(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def name_at(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "state"


def match(
    who: str, wanted: Mapping[str, Leaf], stored: Mapping[str, Leaf], directory: str
) -> dict[str, Origin]:
    """The stored leaf, of the same name, for each wanted leaf; else an error, with all leaves that differ.

    If `jzero.master_weights` came or went, parameters are restored from masters, or masters from parameters.
    """
    moved, dropped = _moved_masters(wanted, stored)
    sources = {name: moved.get(name, Origin(name)) for name in wanted}
    bad = []
    for name, leaf in wanted.items():
        found, text = stored.get(sources[name].name), describe_leaf(*leaf)
        if found is None:
            bad.append(f"{text} is not in the checkpoint")
        elif leaf.shape != found.shape or (leaf.dtype != found.dtype and not sources[name].cast):
            bad.append(f"{text} is {describe_leaf('', *found[1:]).strip()} in the checkpoint")
    left = stored.keys() - dropped - {source.name for source in sources.values()}
    only = [describe_leaf(*leaf) for name, leaf in stored.items() if name in left]
    bad += [f"{text} is in the checkpoint only" for text in only]
    if bad:
        raise CheckpointError(message(
            f"{who} {directory}", bad,
            "A checkpoint is restored into a state with the same leaves, shapes and dtypes.",
            "Use the model and optimizer that it was saved with; python -m jzero inspect lists its leaves."
        ))  # fmt: skip
    return sources


def masters(who: str, leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """The name of the master of each parameter that `master_weights` keeps in more bits."""
    found: dict[str, str] = {}
    for at in _wrappers(leaves):
        pairs = _masters(at, leaves)
        if not pairs and _below(f"{at}inner/", leaves):
            raise CheckpointError(message(
                who, f"the leaves under {at}masters/ are masters of no leaves, or of several trees of leaves",
                "Parameters in another dtype are cast from their masters.",
                f"Export them as they are stored, or the masters: --select '^{at}masters/'."))  # fmt: skip
        found |= {param: master for master, param in pairs}
    return found


def _moved_masters(
    wanted: Mapping[str, Leaf], stored: Mapping[str, Leaf]
) -> tuple[dict[str, Origin], set[str]]:
    """What `master_weights` on one side only moves, and stored leaves that are not needed then."""
    moved: dict[str, Origin] = {}
    dropped: set[str] = set()
    ours, theirs = _wrappers(wanted), _wrappers(stored)
    for at in ours - theirs:
        moved |= {name: Origin(at + rest) for name, rest in _below(f"{at}inner/", wanted)}
        for master, param in _masters(at, wanted):
            moved |= {master: Origin(param), param: Origin(param, cast=True)}
    for at in theirs - ours:
        moved |= {at + rest: Origin(name) for name, rest in _below(f"{at}inner/", stored)}
        for master, param in _masters(at, stored):
            moved[param] = Origin(master)
            dropped.add(param)
    return moved, dropped


def _wrappers(names: Iterable[str]) -> set[str]:
    """Where there is a `MasterWeightsState`, as `opt_state/`; its `inner` may have no leaves."""
    found = (f"/{name}".partition("/masters/") for name in names)
    return {before[1:] + "/" * bool(before) for before, at, _ in found if at}


def _below(prefix: str, names: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, name.removeprefix(prefix)) for name in names if name.startswith(prefix)]


def _masters(at: str, leaves: Mapping[str, Leaf]) -> list[tuple[str, str]]:
    """Each master, and its parameter: of the same name, in fewer bits."""
    masters = _below(f"{at}masters/", leaves)

    def are_params(root: str) -> bool:
        return all(
            (param := leaves.get(root + rest)) is not None
            and param.shape == leaves[master].shape
            and jnp.dtype(param.dtype).itemsize < jnp.dtype(leaves[master].dtype).itemsize
            for master, rest in masters
        )

    first = masters[0][1]
    roots = [
        name.removesuffix(first)
        for name in leaves
        if f"/{name}".endswith(f"/{first}")
        and not name.startswith((f"{at}masters/", f"{at}inner/"))
    ]
    found = list(filter(are_params, roots))
    if len(found) > 1:  # An average of the parameters, say, has their shapes and dtypes, too.
        found = [root for root in found if root.endswith("params/")]
    return [(master, found[0] + rest) for master, rest in masters] if len(found) == 1 else []
