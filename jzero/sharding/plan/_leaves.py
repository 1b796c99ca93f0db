# SPDX-License-Identifier: Apache-2.0
"""Where every leaf of the state is stored: roles from dataflow, layouts from the stage's row."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jzero._blocks import Blocks
from jzero._errors import OptionError, first_of, message
from jzero._memory_kinds import DEVICE
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.sharding.analysis._tables import Tables
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._quantized_form import QuantizedForm
from jzero.sharding.plan._stages import OPTIMIZER, OTHER, PARAMETER, StageAxes, StateLeaf
from jzero.sharding.plan._stored_layout import REPLICATED, Automatic, Shard, StoredLayout
from jzero.tracing import _call


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one leaf of the state is stored."""

    path: str  # in the state, `state.params['w']`
    shape: tuple[int, ...]  # global
    dtype: str  # its name
    itemsize: int
    role: str  # from dataflow: 'parameter', 'optimizer state' or 'other'
    layout: StoredLayout  # as it is stored
    num_shards: int = 1  # that differ
    why_full: str = ""  # why it is replicated although the stage shards its role
    automatic: Automatic = ()  # for each dim, the Auto axes over which XLA shards it (`auto_specs`)
    padding: int = 0  # of the stored sharded dim, if the devices do not divide it
    # The memory in which it is stored: 'device', or its host's: 'pinned_host' (as JAX arrays), 'host', or
    # 'nvme' (files).
    tier: str = DEVICE
    coded: bool = False  # a parameter may be gathered, and its gradient reduced, quantized
    # Stored copies are sent the quantized difference of a new parameter to the old one.
    renewed_in_codes: bool = False
    # Why it is sent, or stored, exactly although other parameters are quantized.
    why_exact: str = ""
    # The form of a leaf that is stored quantized; the other fields then describe its rows of bytes.
    codes: QuantizedForm | None = None
    uncut: str = ""  # why XLA does not shard it as its spec says
    # The layout in which a parameter's gradient is reduced.
    gradient: StoredLayout = REPLICATED
    cuts: tuple[int, ...] = ()  # for each dim of `automatic`, the number of parts

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def is_streamed(self) -> bool:
        """Whether it is a parameter that is stored on the hosts, and fetched for computation."""
        return self.role == PARAMETER and self.tier != DEVICE

    @property
    def padded_shape(self) -> tuple[int, ...]:
        dim = self.layout.dim if isinstance(self.layout, Shard) else None
        return tuple(size + self.padding * (d == dim) for d, size in enumerate(self.shape))

    @property
    def shape_per_device(self) -> tuple[int, ...]:
        """Padding included."""
        cuts = [*self.cuts, *[1] * (len(self.shape) - len(self.cuts))]
        if isinstance(self.layout, Shard):
            cuts[self.layout.dim] *= self.num_shards // math.prod(self.cuts)
        return tuple(n // num for n, num in zip(self.padded_shape, cuts, strict=True))

    @property
    def nbytes_per_device(self) -> int:
        """Bytes stored for each device, padding included, in the memory that `tier` says."""
        return -(-math.prod(self.padded_shape) * self.itemsize // self.num_shards)

    def in_codes(self, blocks: Blocks) -> LeafPlan:
        """The leaf stored quantized: as rows of bytes, sharded over the same devices."""
        cut = self.layout if isinstance(self.layout, Shard) else None
        dim, parts = (cut.dim, self.num_shards) if cut else (None, 1)
        form = QuantizedForm(self.shape, self.dtype, blocks, dim, parts, self.padding)
        layout = Shard(form.rows_dim, cut.axes) if cut and form.rows_dim is not None else REPLICATED
        return dataclasses.replace(
            self,
            shape=form.rows_shape,
            dtype="uint8",
            itemsize=1,
            layout=layout,
            padding=0,
            codes=form,
        )

    @property
    def decoded(self) -> LeafPlan:
        form = self.codes
        if form is None:
            return self
        cut = self.layout if isinstance(self.layout, Shard) else None
        layout = Shard(form.dim, cut.axes) if cut and form.dim is not None else REPLICATED
        return dataclasses.replace(
            self, shape=form.shape, dtype=form.dtype, itemsize=form.itemsize, layout=layout,
            padding=form.padding, codes=None,
        )  # fmt: skip

    def row(self, width: int = 0) -> str:
        why = f"  ({self.why_full})" if self.why_full else ""
        why += f"  (padded by {self.padding})" if self.padding else ""
        why += f"  (auto_specs: {self.uncut})" if self.uncut else ""
        why += f"  ({self.tier})" if self.tier != DEVICE else ""
        why += f"  (of {self.codes})" if self.codes else ""
        dims = ",".join(map(str, self.shape))
        return f"{self.path:<{width}}  {self.dtype}[{dims}]  {self.role}  {self.layout}{why}"


def offload(
    leaves: Sequence[LeafPlan], tier: str, min_bytes: int, staying: Collection[int],
    role: str = OPTIMIZER,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """Moves the leaves of a role to a tier, except scalars, leaves below `min_bytes`, and `staying`."""

    def moves(index: int, leaf: LeafPlan) -> bool:
        large = math.prod(leaf.shape) > 1 and leaf.nbytes >= min_bytes
        return large and leaf.role == role and index not in staying

    return tuple(
        dataclasses.replace(leaf, tier=tier) if moves(i, leaf) else leaf
        for i, leaf in enumerate(leaves)
    )


def axes_away(leaves: Sequence[LeafPlan], shard_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that shard leaves stored off the devices."""
    others = (axes for leaf in leaves if leaf.tier != DEVICE for axes in leaf.automatic)
    return (*shard_axes, *dict.fromkeys(axis for axes in others for axis in axes))


def plan_from_shapes(
    leaves: Sequence[StateLeaf], stage_axes: StageAxes, tier: str = DEVICE, streams: bool = False
) -> tuple[LeafPlan, ...]:
    """The layout before any batch was seen: roles unknown, every leaf sharded that may be.

    It is the final plan at stage 3, except for leaves that only the step can tell apart. With a `tier`, every
    leaf that may turn out to be optimizer state is stored there; sharded ones only, if parameters are too
    (`streams`).
    """
    left_replicated = _left_replicated(stage_axes, leaves, [()] * len(leaves))

    def plan(i: int, leaf: StateLeaf) -> LeafPlan:
        dim, why = stage_axes.choose(leaf, (), i in left_replicated)
        return _leaf_plan(leaf, OTHER, dim, stage_axes.shard_axes, stage_axes, why)

    plans = list(itertools.starmap(plan, enumerate(leaves)))
    in_shards = streams and stage_axes.num_devices > 1
    staying = [
        i
        for i, leaf in enumerate(leaves)
        if not leaf.splittable or (in_shards and not isinstance(plans[i].layout, Shard))
    ]
    return offload(plans, tier, stage_axes.min_bytes, staying, role=OTHER)


class StoredLeaf(NamedTuple):
    """How a leaf of an existing state is stored."""

    spec: tuple[Any, ...]  # the entries of its PartitionSpec, up to the last that names an axis
    padded_shape: tuple[int, ...]  # as it is stored
    tier: str = DEVICE  # 'nvme' if it is in files; else 'device', in any memory
    # The form of a quantized leaf; spec and shape are those of its rows.
    codes: QuantizedForm | None = None


def plan_as_found(
    leaves: Sequence[StateLeaf], stored: Sequence[StoredLeaf | None], stage_axes: StageAxes,
    automatic: Mapping[str, int], frame: Frame, links: Links,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """Leaves that are read as they are stored; tells `links` which dims are sharded.

    `stored` has None for a leaf that is not on this mesh. Such leaves, and those that no stage stores so,
    move to the layout of `plan_from_shapes`.
    """
    sizes = {**automatic, **dict(stage_axes.axes)}
    plans = []
    variables = frame.jaxpr.invars[: len(leaves)]
    moved = plan_from_shapes(leaves, stage_axes)
    for leaf, form, target, var in zip(leaves, stored, moved, variables, strict=True):
        plan = (None if form is None else _as_found(leaf, form, stage_axes, sizes)) or target
        # Integers too: weights may be quantized.
        role = PARAMETER if leaf.splittable else OTHER
        plans.append(dataclasses.replace(plan, role=role))
        if isinstance(plan.layout, Shard):
            links.shard(frame, var, plan.layout.dim, leaf.path)
    return tuple(plans)


def _as_found(
    leaf: StateLeaf, stored: StoredLeaf, stage_axes: StageAxes, sizes: Mapping[str, int]
) -> LeafPlan | None:
    """The plan of a stored leaf, dequantized; None if no stage shards it so: one dim, data axes first."""
    data = dict(stage_axes.axes)
    if stored.codes is not None:
        form = stored.codes
        axes = tuple(axis for entry in stored.spec for axis in _call.spec_axes(entry))
        layout = REPLICATED if form.dim is None else Shard(form.dim, axes)
        return LeafPlan(
            *leaf[:4], OTHER, layout, form.num_parts, padding=form.padding, tier=stored.tier
        )
    entries = [_call.spec_axes(entry) for entry in stored.spec]
    ours = [tuple(axis for axis in axes if axis in data) for axes in entries]
    automatic = tuple(tuple(axis for axis in axes if axis not in data) for axes in entries)
    dims = [dim for dim, axes in enumerate(ours) if axes]
    layout = Shard(dims[0], ours[dims[0]]) if dims else REPLICATED
    padding = sum(stored.padded_shape) - sum(leaf.shape)
    parts = math.prod(sizes[axis] for axes in entries for axis in axes)
    cuts = _stored_layout.cuts_of(automatic, sizes)
    plan = LeafPlan(*leaf[:4], OTHER, layout, parts, "", automatic, padding, cuts=cuts)
    spec = _stored_layout.partition_spec(layout, automatic)
    alike = [*map(_call.spec_axes, spec)] == entries and plan.padded_shape == stored.padded_shape
    return dataclasses.replace(plan, tier=stored.tier) if alike else None


def plan_leaves(
    leaves: Sequence[StateLeaf], feeds: Sequence[bool], stage_axes: StageAxes, frame: Frame,
    links: Links, tables: Tables,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """Roles from dataflow, layouts from the stage's row; tells `links` which dims are sharded."""
    variables = frame.jaxpr.invars[: len(leaves)]
    roles = [*map(_role, leaves, feeds)]
    looped = [links.looped_dims(frame, var) for var in variables]
    left_replicated = _left_replicated(stage_axes, leaves, looped)
    plans: dict[int, LeafPlan] = {}
    # Parameters choose first: optimizer state that is combined with one element by element follows it.
    for i in sorted(range(len(leaves)), key=lambda i: roles[i] != PARAMETER):
        leaf, var, axes, why = leaves[i], variables[i], stage_axes.axes_of(leaves[i], roles[i]), ""
        dim = links.sharded_dim(frame, var)
        dim = None if dim in leaf.taken else dim
        if dim is None and roles[i] != OTHER:
            dim, why = stage_axes.choose(
                leaf, looped[i], i in left_replicated, tables.get((frame, var), ()) if axes else ()
            )
        if dim is not None and roles[i] != OTHER:
            links.shard(frame, var, dim, leaf.path)
        elif roles[i] == PARAMETER:
            links.name(frame, var, leaf.path)
        plans[i] = _leaf_plan(leaf, roles[i], dim, axes, stage_axes, why)
    _check_full(stage_axes, plans.values())
    return tuple(plans[i] for i in range(len(leaves)))


def _leaf_plan(
    leaf: StateLeaf,
    role: str,
    dim: int | None,
    axes: tuple[str, ...],
    stage_axes: StageAxes,
    why: str,
) -> LeafPlan:
    gradient: StoredLayout = REPLICATED
    if role == PARAMETER and dim is not None and stage_axes.shard_axes:
        gradient = Shard(dim, stage_axes.shard_axes)
    layout: StoredLayout = REPLICATED
    num_shards, padding = leaf.parts, 0
    if dim is None or not axes:
        wanted = stage_axes.param_axes if role == PARAMETER else axes
        kept = f"Axes(replicate={stage_axes.full!r})" if dim is not None and wanted else why
        why = kept if wanted else ""
    else:
        layout, why = Shard(dim, axes), ""
        num_shards *= stage_axes.count(axes)
        # Over the optimizer's axes, for parameters too: a parameter's shard is a union of its moments'.
        num = stage_axes.count(stage_axes.shard_axes)
        padding = _stored_layout.padded_size(leaf.shape[dim], num) - leaf.shape[dim]
    return LeafPlan(
        *leaf[:4], role, layout, num_shards, why, leaf.automatic, padding, uncut=leaf.uncut,
        gradient=gradient, cuts=leaf.cuts,
    )  # fmt: skip


def _check_full(stage_axes: StageAxes, plans: Iterable[LeafPlan]) -> None:
    plans = list(plans)
    paths = [plan.path for plan in plans if plan.role == PARAMETER]
    if stage_axes.full is not None and not any(re.search(stage_axes.full, path) for path in paths):
        leaves = first_of([plan.path for plan in plans], 6)
        raise OptionError(message(
            "shard_train_step", f"Axes(replicate={stage_axes.full!r}) matches no parameter",
            "It is a regular expression for the paths of parameters that stay replicated.",
            f"The parameters are {first_of(paths, 6)}." if paths else
            "There are none: with its batch the step reads no array of floats of its state, which has "
            f"{leaves}. Drop replicate."))  # fmt: skip


def _role(leaf: StateLeaf, feeds_batch: bool) -> str:
    if not leaf.splittable:
        return OTHER
    if feeds_batch:
        return PARAMETER if leaf.floating else OTHER
    return OPTIMIZER


# -- leaves that are not worth padding ---------------------------------------------------------------------
# Code outside of a step gathers a padded leaf to compute with it: padding must be worth that.
WORTH_PADDING = 2**20  # bytes that are saved on each device
# Leaves that are left replicated are at most this part of a device's model states.
REPLICATED_SHARE = 100


def _left_replicated(
    stage_axes: StageAxes, leaves: Sequence[StateLeaf], looped: Sequence[Collection[int]]
) -> set[int]:
    """The indices of such leaves: the smallest ones not worth padding, up to `REPLICATED_SHARE`.

    Leaves of one shape, such as a parameter and its moments, are decided together. Leaves that need padding
    only because of loops, which are unknown before a step is traced, come last and do not change the decision
    for others. With `Axes(min_shard_bytes=0)` there are none.
    """
    num = stage_axes.count(stage_axes.shard_axes)
    if num == 1 or not stage_axes.min_bytes:
        return set()
    classes: defaultdict[Any, list[int]] = defaultdict(list)
    saved: dict[Any, int] = defaultdict(int)
    for i, (leaf, dims) in enumerate(zip(leaves, looped, strict=True)):
        saves = _padding_saves(stage_axes, leaf, leaf.taken)
        by_loops = saves is None
        saves = _padding_saves(stage_axes, leaf, leaf.taken | set(dims)) if saves is None else saves
        if saves is not None:
            key = (by_loops, leaf.shape, leaf.automatic)
            classes[key].append(i)
            saved[key] = max(saved[key], saves)
    nbytes = {key: sum(leaves[i].nbytes for i in members) for key, members in classes.items()}
    # Every device has at least its share of every leaf.
    left = sum(leaf.nbytes for leaf in leaves) // num // REPLICATED_SHARE
    out: set[int] = set()
    for key in sorted(classes, key=lambda key: (key[0], nbytes[key])):
        if saved[key] < WORTH_PADDING and nbytes[key] <= left:
            left -= nbytes[key]
            out |= set(classes[key])
    return out


def _padding_saves(stage_axes: StageAxes, leaf: StateLeaf, avoid: Collection[int]) -> int | None:
    """Bytes saved on each device; None for a leaf that needs no padding, or is not sharded at all."""
    num = stage_axes.count(stage_axes.shard_axes)
    dim = _stored_layout.choose_dim(leaf.shape, num, avoid) if leaf.splittable else None
    if dim is None or leaf.shape[dim] % num == 0 or stage_axes.is_small(leaf):
        return None
    size = leaf.shape[dim]
    return leaf.nbytes - leaf.nbytes // size * (_stored_layout.padded_size(size, num) // num)
