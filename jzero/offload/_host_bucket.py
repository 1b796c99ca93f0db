# SPDX-License-Identifier: Apache-2.0
"""`HostBucket`: a bucket of the update that the hosts' processors run, as a function of local shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jzero._errors import OptionError, first_of, message
from jzero._memory_kinds import DEVICE
from jzero.offload._slicing import part_obstacle
from jzero.offload.kernels._code_paths import TracedUpdate
from jzero.segments._builder import Builder
from jzero.segments._segment import shard_of
from jzero.sharding.analysis import _traffic
from jzero.sharding.cut import _elementwise, _subgraphs
from jzero.sharding.cut._subgraphs import Subgraph
from jzero.sharding.plan import _leaves, _stored_layout
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _call, _jaxpr, _rewrite

Var = _jaxpr.Var
WHO = _call.WHO


class HostBucket:
    """The subgraphs of an update that run on the host, as one function of one device's shards."""

    def __init__(self, builder: Builder, indices: Sequence[int]):
        """Takes subgraphs by index; raises an `OptionError` if they need other devices."""
        builder = dataclasses.replace(builder, crosses=True)
        self._plan, self._invars = builder.planned.plan, builder.planned.frame.jaxpr.invars
        self._outvars, self.mesh = builder.planned.frame.jaxpr.outvars, builder.planned.mesh
        self._frame = builder.planned.frame
        subgraphs = [self._plan.update.subgraphs[i] for i in indices]
        self._cut = [subgraph for subgraph in subgraphs if _is_cut(self._plan.leaves, subgraph)]
        _check_cut(builder, self._cut)
        # The same as a program of devices, on leaves in shards, like gradients.
        self.segment = builder.bucket(subgraphs, 0, {})
        uncut = [subgraph for subgraph in subgraphs if subgraph not in self._cut]
        self._uncut = builder.bucket(uncut, 0, {}) if self._cut else self.segment
        self._body = _rewrite.body_of_shard_map(self._uncut.run, *self._uncut.avals())
        if _moves(self._body.jaxpr):
            _refuse(builder, uncut)
        outs, leaves = self.segment.outs, self._plan.leaves
        hosted = {self._invars[i]: i for i, leaf in enumerate(leaves) if leaf.tier != DEVICE}
        mine = {hosted[var] for var in self.segment.takes if var in hosted}
        # The indices of offloaded leaves that it reads or updates.
        self.leaves = sorted({*mine, *(i for i in outs if i in hosted.values())})
        used = {self._uncut.takes[i] for i in self._body.used}
        used.update(var for subgraph in self._cut for var in subgraph.reads)
        # What else it reads: values of the forward-backward program, and leaves on the devices.
        self.reads = [var for var in self.segment.takes if var in used and var not in hosted]
        self.axes = self._body.axes  # whose device indices, int32, follow `reads`
        # The indices of outputs of the step that it makes besides its leaves.
        self.outs = [i for i in outs if i not in self.leaves]

    def update(
        self, state: Sequence[jax.Array], inputs: Sequence[jax.Array]
    ) -> tuple[list[Any], list[Any]]:
        """`(leaves, reads and indices) -> (new leaves, outs)`, all of one device's shards."""
        known = dict(zip(self._known(), [*state, *inputs], strict=False))
        results = self._body.run(
            [known.get(v) for v in self._uncut.takes], inputs[len(self.reads) :]
        )
        made = dict(zip(self._uncut.outs, results[len(self._uncut.gives) :], strict=True))
        for subgraph in self._cut:
            mine = [*subgraph.reads, *(self._invars[i] for i in subgraph.leaves)]
            made |= _elementwise.outputs(self._frame, subgraph, {var: known[var] for var in mine})
        new = [made.get(i, old) for i, old in zip(self.leaves, state, strict=True)]
        return new, [made[i] for i in self.outs]

    def state_avals(self) -> list[jax.ShapeDtypeStruct]:
        leaves = [self._plan.leaves[i] for i in self.leaves]
        return [
            jax.ShapeDtypeStruct(leaf.shape_per_device, jnp.dtype(leaf.dtype)) for leaf in leaves
        ]

    def read_avals(self) -> list[jax.ShapeDtypeStruct]:
        """What it reads, whole, with the sharding of its transfer."""
        return [self.segment.types[var].aval(self.mesh) for var in self.reads]

    def out_avals(self) -> list[jax.ShapeDtypeStruct]:
        """What it makes, whole and padded, with the sharding of its transfer."""
        plan, found = self._plan, []
        for i in self.outs:
            if i < len(plan.leaves):
                found.append(plan.interface.as_passed(self._invars[i]).aval(self.mesh))
            else:
                aval, place = self._outvars[i].aval, _stored_layout.partition_spec(plan.layouts[i])
                sharding = NamedSharding(self.mesh, place)
                found.append(jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding))
        return found

    def out_shapes(self) -> list[tuple[int, ...]]:
        return [self._outvars[i].aval.shape for i in self.outs]

    def names(self) -> list[str]:
        """Of its leaves, then of what it makes."""
        leaves = self._plan.leaves
        made = [
            leaves[i].path if i < len(leaves) else f"output {i - len(leaves)}" for i in self.outs
        ]
        return [*(leaves[i].path for i in self.leaves), *made]

    def input_avals(self) -> list[jax.ShapeDtypeStruct]:
        indices = [jax.ShapeDtypeStruct((), jnp.int32) for _ in self.axes]
        return [*map(shard_of, self.read_avals()), *indices]

    @functools.cached_property
    def traced(self) -> TracedUpdate:
        return TracedUpdate(self.update, self.state_avals(), self.input_avals(), self.names())

    def identity(self) -> tuple[Any, ...] | None:
        """Equal for buckets that do the same, as for two shapes of a batch; None if that is not known."""
        jaxpr, constants = self._body.jaxpr, self._body.constants
        if self._cut:
            jaxpr = jax.make_jaxpr(self.update)(self.state_avals(), self.input_avals())
            constants = [*constants, *jaxpr.consts]
        equations = _rewrite.program_key(jaxpr)
        if constants or equations is None:
            return None
        passed = [(x.shape, x.dtype, x.sharding) for x in (*self.read_avals(), *self.out_avals())]
        # Equations do not say which argument is which leaf.
        place = {var: i for i, var in enumerate(self._known())}
        takes = [place.get(var) for var in self.segment.takes]
        return (equations, *takes, *self.axes, *self.leaves, *self.outs, *self.names(), *passed)

    def _known(self) -> list[Var]:
        return [*(self._invars[i] for i in self.leaves), *self.reads]

    @property
    def shard_axes(self) -> tuple[str, ...]:
        return _leaves.axes_away(self._plan.leaves, self._plan.stage_axes.shard_axes)


def _is_cut(leaves: Sequence[LeafPlan], subgraph: Subgraph) -> bool:
    return any(any(leaves[i].automatic) for i in subgraph.leaves)


def _check_cut(builder: Builder, subgraphs: Sequence[Subgraph]) -> None:
    """The host has, of such leaves, a part of what a program of the data axes has."""
    plan, bad = builder.planned.plan, []
    for subgraph in subgraphs:
        if why := part_obstacle(builder.planned.frame, plan.leaves, plan.interface, subgraph):
            paths = [plan.leaves[i].path for i in _subgraphs.leaves_of([subgraph])]
            bad.append(f"{first_of(paths)}: {why}")
    if bad:
        raise OptionError(message(
            WHO, bad, f"XLA shards them over the mesh axes {list(plan.automatic)}, too, and the host updates "
            "each device's part of them by itself.", "Use jzero.PinnedHost(), which updates on the devices, "
            "or auto_specs that do not cut them.",
            things="groups of leaves", shown=6))  # fmt: skip


def _refuse(builder: Builder, subgraphs: Sequence[Subgraph]) -> None:
    leaves, bad = builder.planned.plan.leaves, []
    for subgraph in subgraphs:
        segment = builder.bucket([subgraph], 0, {})
        body = _rewrite.body_of_shard_map(segment.run, *segment.avals())
        if ops := _moves(body.jaxpr):
            paths = [leaves[i].path for i in _subgraphs.leaves_of([subgraph])]
            where = _elementwise.obstacle(builder.planned.frame, subgraph)
            bad.append(
                f"{first_of(paths)}: {', '.join(ops)} between the devices{where and f' ({where})'}"
            )
    raise OptionError(message(
        WHO, bad, "What the host updates must follow from one device's shards: its processors take part "
        "in no collective.", "Drop what asks for it (a norm of the updates, as a metric), or use "
        "jzero.PinnedHost(), which updates on the devices.",
        things="groups of leaves", shown=6))  # fmt: skip


def _moves(jaxpr: Any) -> list[str]:
    """The collectives of a jaxpr, and other uses of the mesh."""
    found = [c.op for c in _traffic.collectives(jaxpr)]
    return list(dict.fromkeys([*found, *_asks(jaxpr)]))


def _asks(jaxpr: Any) -> list[str]:
    eqns = _jaxpr.open_jaxpr(jaxpr)[0].eqns
    found = ["axis_index in a loop"] * any(e.primitive.name == "axis_index" for e in eqns)
    return found + [x for e in eqns for sub in _jaxpr.inner_jaxprs(e) for x in _asks(sub)]
