"""The stage table, and the plan: where every leaf of the state rests, as a frozen value."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jzero._errors import OptionError, message
from jzero._memory_kinds import DEVICE
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import FULL, Automatic, Layout, Shard

PARAMETER, OPTIMIZER, OTHER = "parameter", "optimizer state", "other"


class Stage(NamedTuple):
    """One row of the stage table: which roles rest as shards (ZeRO, section 5).

    `reduce_once`: gradients of microbatches are reduced once, after the last; from stage 2 on they are
    reduced as they are produced, so that a full gradient never outlives its microbatch.
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


class Leaf(NamedTuple):
    """What the plan must know of a state leaf; PRNG keys are not splittable.

    It is cut into `parts` over mesh axes that are not data axes, along the dims that `automatic` says.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    splittable: bool
    floating: bool
    automatic: Automatic = ()
    parts: int = 1

    @property
    def taken(self) -> set[int]:
        """Dims that are sharded over other axes than the data axes."""
        return {dim for dim, axes in enumerate(self.automatic) if axes}


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A stage on a mesh: over which axes each role rests; `()` is full.

    Attributes:
      axes: names and sizes of the data axes.
      param_axes: over which parameters rest; the first of `shard_axes`.
      shard_axes: over which optimizer state rests and gradients are reduce-scattered.
      min_bytes: leaves smaller than this stay full.
      full: a regular expression; parameters whose path it matches rest full.
    """

    axes: tuple[tuple[str, int], ...]
    param_axes: tuple[str, ...]
    shard_axes: tuple[str, ...]
    min_bytes: int = 0
    full: str | None = None

    def count(self, axes: Sequence[str]) -> int:
        """How many shards there are over `axes`."""
        return math.prod(dict(self.axes)[axis] for axis in axes)

    def choose(self, leaf: Leaf, looped: set[int]) -> tuple[int | None, str]:
        """The dim along which a leaf can rest in shards, or None and the reason."""
        num = self.count(self.shard_axes)
        if num == 1:
            return None, ""
        avoid = looped | leaf.taken
        dim = _layout.choose_dim(leaf.shape, num, avoid) if leaf.splittable else None
        if dim is None:
            return None, _layout.why_full(leaf.shape, avoid)
        if math.prod(leaf.shape) * leaf.itemsize < self.min_bytes:
            return None, f"smaller than min_shard_bytes={self.min_bytes}"
        return dim, ""

    def axes_of(self, leaf: Leaf, role: str) -> tuple[str, ...]:
        """The axes over which a leaf rests if it has a dim for them."""
        if role == PARAMETER and self.full is not None and re.search(self.full, leaf.path):
            return ()
        return {PARAMETER: self.param_axes, OPTIMIZER: self.shard_axes, OTHER: ()}[role]


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
      num_shards: how many devices hold different parts of it.
      automatic: for each dim, the other mesh axes over which XLA shards it (`auto_specs`).
      padding: what is added at rest to the sharded dim, if the devices do not divide it.
      why_full: the reason, for a leaf that the stage would shard and that stays full.
      tier: the memory in which it rests: 'device', or its host's: 'pinned_host' (as JAX arrays), 'host'.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    role: str
    layout: Layout
    num_shards: int = 1
    why_full: str = ""
    automatic: Automatic = ()
    padding: int = 0
    tier: str = DEVICE

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape at rest: the sharded dim is a multiple of the devices."""
        dim = self.layout.dim if isinstance(self.layout, Shard) else None
        return tuple(size + self.padding * (d == dim) for d, size in enumerate(self.shape))

    @property
    def shape_per_device(self) -> tuple[int, ...]:
        """The shape of each device's part, padding included; of leaves that only data axes cut."""
        if not isinstance(self.layout, Shard):
            return self.shape
        num, dim = self.num_shards, self.layout.dim
        return tuple(n // num if d == dim else n for d, n in enumerate(self.padded_shape))

    @property
    def nbytes_per_device(self) -> int:
        """Bytes at rest of each device's part, padding included; in the memory that `tier` says."""
        return math.prod(self.padded_shape) * self.itemsize // self.num_shards

    def row(self, width: int = 0) -> str:
        """One line: path (as wide as told), type, role, layout."""
        why = f"  ({self.why_full})" if self.why_full else ""
        why += f"  (padded by {self.padding})" if self.padding else ""
        why += f"  ({self.tier})" if self.tier != DEVICE else ""
        dims = ",".join(map(str, self.shape))
        return f"{self.path:<{width}}  {self.dtype}[{dims}]  {self.role}  {self.layout}{why}"


@dataclasses.dataclass(frozen=True)
class Turn:
    """What of the optimizer state is on the devices together, while a step updates it.

    Attributes:
      leaves: their paths.
      nbytes: of them, on each device.
      parts: how many slices the leaves are cut into; each visits the devices by itself.
      nbytes_at_once: of such a slice.
    """

    leaves: tuple[str, ...]
    nbytes: int
    parts: int = 1
    nbytes_at_once: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes where: frozen, printable, hashable, the same on every process.

    Attributes:
      stage: 0 to 3.
      axes: names and sizes of the mesh axes that the step is sharded over.
      reductions: 'whole batch' (where the step sums over it), or 'written' (the step's own collectives).
      leaves: one `LeafPlan` per leaf of the state, in the order of `jax.tree.leaves`.
      accumulate: microbatches that each device works through in a step.
      reduce_once: gradients are reduced after the last microbatch, not for each.
      turns: in which offloaded leaves visit the devices, in order.
      device_bytes: the most bytes of offloaded leaves on each device at any time.
    """

    stage: int
    axes: tuple[tuple[str, int], ...]
    reductions: str
    leaves: tuple[LeafPlan, ...]
    accumulate: int = 1
    reduce_once: bool = False
    turns: tuple[Turn, ...] = ()
    device_bytes: int = 0

    @property
    def num_devices(self) -> int:
        """Devices that the state is sharded over."""
        return math.prod(size for _, size in self.axes)

    @property
    def fingerprint(self) -> str:
        """Short hash of everything in the plan; processes compare it, among all that decides a program."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def nbytes_at_rest(self, role: str | None = None, tier: str = DEVICE) -> int:
        """Bytes of each device between steps, of one role or of all, in one tier of memory."""
        return sum(
            leaf.nbytes_per_device
            for leaf in self.leaves
            if leaf.tier == tier and role in (None, leaf.role)
        )

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes)
        width = max((len(leaf.path) for leaf in self.leaves), default=0)
        rows = [f"  {leaf.row(width)}" for leaf in self.leaves]
        return "\n".join([f"stage {self.stage} over {axes}; reductions: {self.reductions}", *rows])


def offload(
    leaves: Sequence[LeafPlan], tier: str, min_bytes: int, staying: Collection[int],
    role: str = OPTIMIZER,
) -> tuple[LeafPlan, ...]:  # fmt: skip
    """The leaves of a role moved to a tier, but for scalars, those below `min_bytes`, and `staying`."""

    def moves(index: int, leaf: LeafPlan) -> bool:
        large = math.prod(leaf.shape) > 1 and leaf.nbytes >= min_bytes
        return large and leaf.role == role and index not in staying

    return tuple(
        dataclasses.replace(leaf, tier=tier) if moves(i, leaf) else leaf
        for i, leaf in enumerate(leaves)
    )


def plan_from_shapes(
    leaves: Sequence[Leaf], sharding: Sharding, tier: str = DEVICE
) -> tuple[LeafPlan, ...]:
    """The layout before any batch was seen: roles unknown, every leaf sharded that can be.

    Equal to the final plan at stage 3 except for leaves that only the step can tell apart. With a `tier`,
    every leaf that may turn out to be optimizer state rests there.
    """

    def plan(leaf: Leaf) -> LeafPlan:
        dim, why = sharding.choose(leaf, set())
        return _leaf_plan(leaf, OTHER, dim, sharding.shard_axes, sharding, why)

    keys = [i for i, leaf in enumerate(leaves) if not leaf.splittable]
    return offload(list(map(plan, leaves)), tier, sharding.min_bytes, keys, role=OTHER)


def plan_leaves(
    leaves: Sequence[Leaf], sharding: Sharding, frame: Frame, links: Links
) -> tuple[LeafPlan, ...]:
    """Roles from dataflow, layouts from the stage's row; tells `links` which dims are sharded.

    Args:
      leaves: the state's leaves; their variables are the first of `frame.jaxpr.invars`.
      sharding: the stage on the mesh.
      frame: the step, analysed.
      links: linked dims of the step.

    Raises:
      OptionError: `sharding.full` matches no parameter.
    """
    variables = frame.jaxpr.invars[: len(leaves)]
    roles = [
        _role(leaf, var in frame.feeds_batch) for leaf, var in zip(leaves, variables, strict=True)
    ]
    plans: dict[int, LeafPlan] = {}
    # Parameters choose first: optimizer state that is combined with one element by element follows it.
    for i in sorted(range(len(leaves)), key=lambda i: roles[i] != PARAMETER):
        leaf, var, axes, why = leaves[i], variables[i], sharding.axes_of(leaves[i], roles[i]), ""
        dim = links.sharded_dim(frame, var)
        dim = None if dim in leaf.taken else dim
        if dim is None and roles[i] != OTHER:
            dim, why = sharding.choose(leaf, links.looped_dims(frame, var))
        if dim is not None and roles[i] != OTHER:
            links.shard(frame, var, dim, leaf.path)
        plans[i] = _leaf_plan(leaf, roles[i], dim, axes, sharding, why)
    _check_full(sharding, plans.values())
    return tuple(plans[i] for i in range(len(leaves)))


def _leaf_plan(
    leaf: Leaf, role: str, dim: int | None, axes: tuple[str, ...], sharding: Sharding, why: str
) -> LeafPlan:
    if dim is None or not axes:
        wanted = sharding.param_axes if role == PARAMETER else axes
        kept = f"full={sharding.full!r}" if dim is not None and wanted else why
        why = kept if wanted else ""
        return LeafPlan(*leaf[:4], role, FULL, leaf.parts, why, leaf.automatic)
    num_shards = sharding.count(axes) * leaf.parts
    size = leaf.shape[dim]
    # Over the optimizer's axes, for parameters too: a parameter's shard is a union of its moments'.
    padding = _layout.padded_size(size, sharding.count(sharding.shard_axes)) - size
    return LeafPlan(
        *leaf[:4], role, Shard(dim, axes), num_shards, "", leaf.automatic, padding=padding
    )


def _check_full(sharding: Sharding, plans: Iterable[LeafPlan]) -> None:
    paths = [plan.path for plan in plans if plan.role == PARAMETER]
    if sharding.full is not None and not any(re.search(sharding.full, path) for path in paths):
        raise OptionError(message(
            "shard_train_step", f"full={sharding.full!r} matches no parameter",
            "It is a regular expression for the paths of parameters that stay full.",
            f"The parameters are {', '.join(paths[:6])}{', ...' if len(paths) > 6 else ''}."))  # fmt: skip


def _role(leaf: Leaf, feeds_batch: bool) -> str:
    if not leaf.splittable:
        return OTHER
    if feeds_batch:
        return PARAMETER if leaf.floating else OTHER
    return OPTIMIZER
