# SPDX-License-Identifier: Apache-2.0
"""The layouts in which a step's programs take values from the caller, or pass them to one another."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._quantized_form import QuantizedForm
from jzero.sharding.plan._stages import StageAxes
from jzero.sharding.plan._stored_layout import REPLICATED, Automatic, Shard, StoredLayout
from jzero.tracing import _call, _jaxpr


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """The layout of one value between programs."""

    path: str  # of the leaf that it is, or is a gradient of; '' if there is none
    shape: tuple[int, ...]  # global
    dtype: jax.typing.DTypeLike
    layout: StoredLayout
    padded_shape: tuple[int, ...]  # `shape`, with padding of the sharded dim
    spec: P  # `layout` as a PartitionSpec over data axes
    # How a quantized leaf is stored; the other fields are then those of its codes.
    codes: QuantizedForm | None = None
    automatic: Automatic = ()  # for each dim, the mesh's Auto axes over which XLA shards it

    @property
    def dim(self) -> int | None:
        return self.layout.dim if isinstance(self.layout, Shard) else None

    def aval(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, _stored_layout.beside(self.spec, self.automatic))
        return jax.ShapeDtypeStruct(self.padded_shape, self.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class ProgramInterface:
    """Every value that a program of a step takes from the caller or from another program."""

    # The step's inputs: leaves of the state as they are stored, and arguments.
    stored: Mapping[_jaxpr.Var, ValuePlan]
    # Values that one program passes to another, sharded like gradients; and leaves of the state as they are
    # when they move to the host or are updated in slices.
    passed: Mapping[_jaxpr.Var, ValuePlan]

    @property
    def variables(self) -> Set[_jaxpr.Var]:
        return self.stored.keys() | self.passed.keys()

    def of(self, var: _jaxpr.Var) -> ValuePlan:
        return self.stored[var] if var in self.stored else self.passed[var]

    def as_passed(self, var: _jaxpr.Var) -> ValuePlan:
        """The form of a value that is passed between programs; arguments have only one."""
        return self.passed[var] if var in self.passed else self.stored[var]

    def rows(self, names: Mapping[_jaxpr.Var, str]) -> Iterator[str]:
        for what, values in (("stored", self.stored), ("passed", self.passed)):
            for var, plan in values.items():
                value = f"{plan.path} {plan.dtype}{list(plan.shape)}"
                value += f" {plan.automatic}" * any(plan.automatic)
                yield f"{what} {names[var]} {value}: {plan.layout} {plan.spec}"


def interface_of(
    frame: Frame, links: Links, stage_axes: StageAxes, leaves: Sequence[LeafPlan],
    arguments: Sequence[P], batch_axes: Mapping[str, int], update: OptimizerProgram,
) -> ProgramInterface:  # fmt: skip
    """`batch_axes`: into how many parts each data axis splits the arguments, microbatches counted in."""
    invars, outvars = frame.jaxpr.invars, frame.jaxpr.outvars
    stored = {var: _leaf(leaf, var) for var, leaf in zip(invars, leaves, strict=False)}
    for var, spec in zip(invars[len(leaves) :], arguments, strict=True):
        shape = _global_shape(var.aval.shape, spec, batch_axes)
        stored[var] = ValuePlan("", shape, var.aval.dtype, REPLICATED, shape, spec)
    if not update.subgraphs:
        return ProgramInterface(stored, {})
    read = {var for subgraph in update.subgraphs for var in subgraph.reads}
    passed = {
        # As the update reads the leaf, or else as it returns it: where parameters are only a cast of masters,
        # nothing else links the two.
        var: _like_gradient(frame, links, stage_axes, var, var if var in read else new, leaf.path)
        for var, new, leaf in zip(invars, outvars, leaves, strict=False)
    }
    between = [*update.transferred, *(var for each in update.subgraphs for var in each.gives)]
    for var in dict.fromkeys(between):
        passed[var] = _like_gradient(frame, links, stage_axes, var, var, links.leaf_of(frame, var))
    automatic = _automatic(frame, leaves, update)
    passed = {
        var: dataclasses.replace(value, automatic=automatic.get(var, ()))
        for var, value in passed.items()
    }
    return ProgramInterface(stored, passed)


def _automatic(
    frame: Frame, leaves: Sequence[LeafPlan], update: OptimizerProgram
) -> dict[_jaxpr.Var, Automatic]:
    """How XLA shards values that are passed: like the optimizer state beside them, if that is alike."""
    found: dict[_jaxpr.Var, set[Automatic]] = {}
    for subgraph in update.subgraphs:
        mine = {leaves[i].automatic for i in subgraph.leaves}
        shapes = {leaves[i].shape for i in subgraph.leaves}
        renewed = (frame.jaxpr.invars[i] for i in subgraph.outs if i < len(leaves))
        for var in {*subgraph.reads, *renewed}:
            found.setdefault(var, set()).update(mine if var.aval.shape in shapes else {()})
    return {var: each.pop() for var, each in found.items() if len(each) == 1}


def _global_shape(local: Sequence[int], spec: P, batch_axes: Mapping[str, int]) -> tuple[int, ...]:
    """The global shape of an argument; a microbatch of one device has `local`."""
    parts = [math.prod(batch_axes[axis] for axis in _call.spec_axes(entry)) for entry in spec]
    return (*map(operator.mul, local, parts), *local[len(parts) :])


def _leaf(leaf: LeafPlan, var: _jaxpr.Var) -> ValuePlan:
    spec = _stored_layout.partition_spec(leaf.layout)
    dtype = leaf.dtype if leaf.codes else var.aval.dtype
    return ValuePlan(
        leaf.path,
        leaf.shape,
        dtype,
        leaf.layout,
        leaf.padded_shape,
        spec,
        leaf.codes,
        leaf.automatic,
    )


def _like_gradient(
    frame: Frame, links: Links, stage_axes: StageAxes, var: _jaxpr.Var, like: _jaxpr.Atom, path: str
) -> ValuePlan:
    """`var`, sharded along the dim linked with `like`, over all of the optimizer's axes."""
    axes, shape = stage_axes.shard_axes, var.aval.shape
    dim = links.sharded_dim(frame, like) if stage_axes.num_devices > 1 else None
    layout = REPLICATED if dim is None else Shard(dim, axes)
    num = stage_axes.count(axes)
    padded = tuple(
        _stored_layout.padded_size(n, num) if d == dim else n for d, n in enumerate(shape)
    )
    spec = _stored_layout.partition_spec(layout)
    return ValuePlan(path, shape, var.aval.dtype, layout, padded, spec)
