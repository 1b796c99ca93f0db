# SPDX-License-Identifier: Apache-2.0
"""The boundary: how values lie where a program of a step takes them, or hands them to another one."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Set

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._links import Links
from jzero.sharding.cut._subgraphs import OptimizerProgram
from jzero.sharding.plan import _layout
from jzero.sharding.plan._layout import REPLICATED, Automatic, Shard, StoredLayout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.sharding.plan._quantized_form import QuantizedForm
from jzero.sharding.plan._stages import StageAxes
from jzero.tracing import _call, _jaxpr


@dataclasses.dataclass(frozen=True)
class ValuePlan:
    """How one value lies on the devices while no program runs.

    Attributes:
      path: the leaf that it is, or is a gradient of; '' if there is none.
      shape: its whole shape.
      dtype: its dtype.
      layout: full, or the dim and axes over which it is sharded.
      padded_shape: the whole shape with what is added to the sharded dim.
      spec: the layout as JAX spells it, of data axes.
      codes: of a leaf that rests in codes, how; the rest is said of its rows.
      automatic: for each dim, the other mesh axes over which XLA shards it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    layout: StoredLayout
    padded_shape: tuple[int, ...]
    spec: P
    codes: QuantizedForm | None = None
    automatic: Automatic = ()

    @property
    def dim(self) -> int | None:
        """The dim along which it is sharded; None if it is replicated."""
        return self.layout.dim if isinstance(self.layout, Shard) else None

    def aval(self, mesh: Mesh) -> jax.ShapeDtypeStruct:
        """Its type as an argument of programs."""
        sharding = NamedSharding(mesh, _layout.beside(self.spec, self.automatic))
        return jax.ShapeDtypeStruct(self.padded_shape, self.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Every value that a program of a step takes from the caller or from another program.

    Attributes:
      at_rest: the step's inputs: leaves of the state as they rest, and arguments.
      crossing: values that one program hands to another, in shards like gradients; and leaves of the state,
        as they are when they cross to the host or meet gradients in slices.
    """

    at_rest: Mapping[_jaxpr.Var, ValuePlan]
    crossing: Mapping[_jaxpr.Var, ValuePlan]

    @property
    def variables(self) -> Set[_jaxpr.Var]:
        return self.at_rest.keys() | self.crossing.keys()

    def of(self, var: _jaxpr.Var) -> ValuePlan:
        return self.at_rest[var] if var in self.at_rest else self.crossing[var]

    def crossed(self, var: _jaxpr.Var) -> ValuePlan:
        """The form of a value that is passed between programs; arguments have only one."""
        return self.crossing[var] if var in self.crossing else self.at_rest[var]

    def rows(self, names: Mapping[_jaxpr.Var, str]) -> Iterator[str]:
        """Lines: each value by its variable's name."""
        for what, values in (("at rest", self.at_rest), ("crossing", self.crossing)):
            for var, plan in values.items():
                value = f"{plan.path} {plan.dtype}{list(plan.shape)}"
                value += f" {plan.automatic}" * any(plan.automatic)
                yield f"{what} {names[var]} {value}: {plan.layout} {plan.spec}"


def boundary_of(
    frame: Frame, links: Links, stage_axes: StageAxes, leaves: Sequence[LeafPlan],
    arguments: Sequence[P], batch_axes: Mapping[str, int], update: OptimizerProgram,
) -> Boundary:  # fmt: skip
    """The boundary of a step with this optimizer program.

    Args:
      frame: the root frame.
      links: which of its dims are sharded.
      stage_axes: over which axes.
      leaves: of the state; their variables are the first inputs.
      arguments: how each other input is split.
      batch_axes: into how many parts each data axis splits them, microbatches too.
      update: what does not run with the rest of the step.
    """
    invars, outvars = frame.jaxpr.invars, frame.jaxpr.outvars
    at_rest = {var: _leaf(leaf, var) for var, leaf in zip(invars, leaves, strict=False)}
    for var, spec in zip(invars[len(leaves) :], arguments, strict=True):
        shape = _whole_shape(var.aval.shape, spec, batch_axes)
        at_rest[var] = ValuePlan("", shape, var.aval.dtype, REPLICATED, shape, spec)
    if not update.subgraphs:
        return Boundary(at_rest, {})
    read = {var for subgraph in update.subgraphs for var in subgraph.reads}
    crossing = {
        # A leaf crosses as the update reads it, or else as it is renewed: nothing else may tie the two, where
        # parameters are only a cast of masters.
        var: _like_gradient(frame, links, stage_axes, var, var if var in read else new, leaf.path)
        for var, new, leaf in zip(invars, outvars, leaves, strict=False)
    }
    handed = [*update.boundary, *(var for subgraph in update.subgraphs for var in subgraph.gives)]
    for var in dict.fromkeys(handed):
        crossing[var] = _like_gradient(
            frame, links, stage_axes, var, var, links.leaf_of(frame, var)
        )
    automatic = _automatic(frame, leaves, update)
    crossing = {
        var: dataclasses.replace(value, automatic=automatic.get(var, ()))
        for var, value in crossing.items()
    }
    return Boundary(at_rest, crossing)


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


def _whole_shape(local: Sequence[int], spec: P, batch_axes: Mapping[str, int]) -> tuple[int, ...]:
    """The global shape of an argument, of which a microbatch of one device has `local`."""
    parts = [math.prod(batch_axes[axis] for axis in _call.spec_axes(entry)) for entry in spec]
    return (*map(operator.mul, local, parts), *local[len(parts) :])


def _leaf(leaf: LeafPlan, var: _jaxpr.Var) -> ValuePlan:
    spec = _layout.partition_spec(leaf.layout)
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
    padded = tuple(_layout.padded_size(n, num) if d == dim else n for d, n in enumerate(shape))
    spec = _layout.partition_spec(layout)
    return ValuePlan(path, shape, var.aval.dtype, layout, padded, spec)
