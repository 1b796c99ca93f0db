"""The stage table, and the plan: where every leaf of the state rests, as a frozen value."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from jzero.sharding import _layout
from jzero.sharding._frames import Frame
from jzero.sharding._layout import FULL, Full, Layout, Shard
from jzero.sharding._links import Links

PARAMETER, OPTIMIZER, OTHER = "parameter", "optimizer state", "other"


class Stage(NamedTuple):
    """One row of the stage table: which roles rest as shards (ZeRO, section 5).

    `reduce_once`: a step's own loop over microbatches reduces gradients once, after it; from stage 2 on
    they are reduced as they are produced, so that a full gradient never outlives its microbatch.
    """

    parameters: bool
    optimizer: bool
    reduce_once: bool


STAGES = {
    0: Stage(parameters=False, optimizer=False, reduce_once=True),
    1: Stage(parameters=False, optimizer=True, reduce_once=True),
    2: Stage(parameters=False, optimizer=True, reduce_once=False),
    3: Stage(parameters=True, optimizer=True, reduce_once=False),
}


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Where one leaf of the state rests.

    Attributes:
      path: the leaf's path in the state, `state.params['w']`.
      shape: its whole shape.
      dtype: its dtype's name.
      itemsize: bytes per element.
      role: 'parameter', 'optimizer state' or 'other', from dataflow.
      layout: full, or the dim and axes it is sharded over.
      why_full: the reason, for a leaf that the stage would shard and that stays full.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    role: str
    layout: Layout
    why_full: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize

    def nbytes_per_device(self, num_devices: int) -> int:
        """Bytes at rest on each device."""
        return self.nbytes if isinstance(self.layout, Full) else self.nbytes // num_devices


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes where: frozen, printable, hashable, the same on every process.

    Attributes:
      stage: 0 to 3.
      axes: names and sizes of the mesh axes that the step is sharded over.
      reductions: how the step says where gradients are reduced: 'typed' (JAX's AD placed them),
        'written' (the step's own collectives) or 'marked' (at `jax.value_and_grad`).
      leaves: one `LeafPlan` per leaf of the state, in the order of `jax.tree.leaves`.
      accumulate: microbatches that each device works through in a step.
      reduce_once: gradients are reduced after the last microbatch, not for each.
    """

    stage: int
    axes: tuple[tuple[str, int], ...]
    reductions: str
    leaves: tuple[LeafPlan, ...]
    accumulate: int = 1
    reduce_once: bool = False

    @property
    def num_devices(self) -> int:
        """Devices that the state is sharded over."""
        return math.prod(size for _, size in self.axes)

    @property
    def fingerprint(self) -> str:
        """Short hash of everything in the plan; equal on processes that will run the same program."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def nbytes_at_rest(self, role: str | None = None) -> int:
        """Bytes on each device between steps, of one role or of all."""
        return sum(
            leaf.nbytes_per_device(self.num_devices)
            for leaf in self.leaves
            if role is None or leaf.role == role
        )

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        lines = [f"stage {self.stage} over {axes}; reductions: {self.reductions}"]
        for leaf in self.leaves:
            why = f"  ({leaf.why_full})" if leaf.why_full else ""
            dims = ",".join(map(str, leaf.shape))
            lines.append(
                f"  {leaf.path:<{width}}  {leaf.dtype}[{dims}]  {leaf.role}  {leaf.layout}{why}"
            )
        return "\n".join(lines)


class Leaf(NamedTuple):
    """What the plan must know of a state leaf; PRNG keys are not splittable."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    splittable: bool
    floating: bool


def plan_from_shapes(
    leaves: Sequence[Leaf], stage: int, axes: tuple[tuple[str, int], ...]
) -> tuple[LeafPlan, ...]:
    """The layout before any batch was seen: roles unknown, every leaf sharded that can be.

    Equal to the final plan at stage 3 except for leaves that only the step can tell apart.
    """
    num = math.prod(size for _, size in axes)
    names = tuple(name for name, _ in axes)

    def layout(leaf: Leaf) -> tuple[Layout, str]:
        return _layout_of(leaf, stage > 0, num, names, set())

    return tuple(LeafPlan(*leaf[:4], OTHER, *layout(leaf)) for leaf in leaves)


def plan_leaves(
    leaves: Sequence[Leaf], stage: int, axes: tuple[tuple[str, int], ...],
    frame: Frame, links: Links, averaged: Sequence[bool],
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """Roles from dataflow, layouts from the stage's row; tells `links` which dims are sharded.

    Args:
      leaves: the state's leaves; their variables are the first of `frame.jaxpr.invars`.
      stage: 0 to 3.
      axes: names and sizes of the data axes.
      frame: the step, analysed.
      links: linked dims of the step.
      averaged: leaves whose new value differs between devices and is averaged (batch statistics).
    """
    row, num = STAGES[stage], math.prod(size for _, size in axes)
    names = tuple(name for name, _ in axes)
    variables = frame.jaxpr.invars[: len(leaves)]
    roles = [
        _role(leaf, var in frame.feeds_batch, mean)
        for leaf, var, mean in zip(leaves, variables, averaged, strict=True)
    ]
    sharded = {PARAMETER: row.parameters, OPTIMIZER: row.optimizer, OTHER: False}
    plans: dict[int, LeafPlan] = {}
    # Parameters choose first: optimizer state that is combined with one element by element follows it.
    for i in sorted(range(len(leaves)), key=lambda i: roles[i] != PARAMETER):
        leaf, var = leaves[i], variables[i]
        looped = links.looped_dims(frame, var)
        dim = links.sharded_dim(frame, var, num)
        layout, why = (
            (Shard(dim, names), "") if dim is not None
            else _layout_of(leaf, row.optimizer and roles[i] != OTHER, num, names, looped)
        )  # fmt: skip
        if row.optimizer and roles[i] != OTHER and isinstance(layout, Shard):
            links.shard(frame, var, layout.dim, leaf.path)
        rests = layout if sharded[roles[i]] else FULL
        plans[i] = LeafPlan(*leaf[:4], roles[i], rests, why if sharded[roles[i]] else "")
    return tuple(plans[i] for i in range(len(leaves)))


def _role(leaf: Leaf, feeds_batch: bool, averaged: bool) -> str:
    if averaged or not leaf.splittable:
        return OTHER
    if feeds_batch:
        return PARAMETER if leaf.floating else OTHER
    return OPTIMIZER


def _layout_of(
    leaf: Leaf, wanted: bool, num: int, axes: tuple[str, ...], looped: set[int]
) -> tuple[Layout, str]:
    if not wanted or num == 1:
        return FULL, ""
    dim = _layout.choose_dim(leaf.shape, num, looped) if leaf.splittable else None
    if dim is not None:
        return Shard(dim, axes), ""
    return FULL, _layout.why_full(leaf.shape, num, looped)
