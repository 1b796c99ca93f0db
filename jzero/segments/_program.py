# SPDX-License-Identifier: Apache-2.0
"""The program of a step for one set of shapes: traced, planned, and ready to run."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero._errors import MeshError, message
from jzero._memory_kinds import DEVICE, HOST, NVME, PINNED, HostNeed
from jzero.offload.schedule import _folds
from jzero.segments import _derivatives
from jzero.sharding.partition._movement import Movement
from jzero.sharding.plan import _stored_layout
from jzero.sharding.plan._backend import Shared, StepProgram
from jzero.sharding.plan._config import StepConfig
from jzero.sharding.plan._extra_work import Extra
from jzero.sharding.plan._leaves import LeafPlan, StoredLeaf
from jzero.sharding.plan._local_step import (
    FlatStep,
    as_traced,
    check_movements,
    local_step,
    promoted,
    with_paths,
)
from jzero.sharding.plan._make import make_plan, state_leaves
from jzero.sharding.plan._plan import StepPlan
from jzero.sharding.plan._trace import WRITTEN
from jzero.tracing import _call, _jaxpr, _not_arrays, _objects, _reading, _weak
from jzero.tracing._forwarded import restored
from jzero.tracing._modules import Filtered
from jzero.tracing._objects import AsPytrees, Mutated
from jzero.tracing._reading import Elsewhere
from jzero.tracing._returned import find_state, new_state
from jzero.tracing._signature import Signature

WHO = _call.WHO
# JAX's memory kinds for tiers; leaves that are not stored as JAX arrays are created in pinned memory.
_MEMORY_KINDS = {DEVICE: None, HOST: PINNED, NVME: PINNED}


@dataclasses.dataclass(frozen=True)
class Program:
    plan: StepPlan
    step: StepProgram  # `(state leaves, argument leaves) -> (state leaves, outputs)`
    out_tree: Any  # Of the results; the state's leaves come first.
    state_shardings: list[NamedSharding]
    argument_shardings: list[NamedSharding]
    keys: tuple[str, ...]  # Arguments taken for PRNG keys, if the step has collectives of its own.
    movements: tuple[Movement, ...]
    whole_arguments: tuple[str, ...]  # Replicated, because the devices do not divide their rows.
    extra_work: tuple[Extra, ...]
    state: tuple[
        jax.ShapeDtypeStruct, ...
    ]  # Promoted, where the step promotes: [Note: weak types].
    as_traced: Callable[..., _jaxpr.Traced]  # Traces the step of the whole batch again.
    closes_over: tuple[Any, ...]  # Tracers of an outer trace that the step reads.

    @functools.cached_property
    def as_written(self) -> Callable[..., Any] | None:
        """The step of the whole batch, for `_derivatives`; None if it is written for one device."""
        if self.plan.reductions == WRITTEN:
            return None
        whole = [
            NamedSharding(place.mesh, PartitionSpec()) if leaf.padding else place
            for leaf, place in zip(self.plan.leaves, self.state_shardings, strict=True)
        ]
        num_new = self.out_tree.num_leaves - len(self.plan.outputs)
        places = [*whole, *self.argument_shardings]
        traced = self.as_traced(on_mesh=True)
        return _derivatives.as_written(traced, places, self.closes_over, num_new)

    def host_needs(self) -> list[HostNeed]:
        """The host memory that a step needs while it runs, for all devices of this process."""
        needs = [*_folds.host_needs(self.step.schedule())]
        if not self.plan.donates:
            needs.append(HostNeed("state", PINNED, self.plan.nbytes_at_rest(tier=PINNED)))
        mesh = self.state_shardings[0].mesh if self.state_shardings else None
        num = len(mesh.local_devices) if isinstance(mesh, Mesh) else 0  # An abstract one has none.
        return [need._replace(nbytes=num * need.nbytes) for need in needs if need.nbytes]


def build(
    step_fn: Callable[..., Any], signature: Signature, config: StepConfig, state: Any,
    arrays: dict[str, Any], static: tuple[tuple[str, Any], ...], shared: Shared,
    stored: Sequence[StoredLeaf | None] = (),
) -> Program:  # fmt: skip
    """Traces the step, plans it, and builds what runs the plan.

    `state` and `arrays` are trees of `ShapeDtypeStruct`s. `shared` is for all programs of a step. `stored`
    says how the leaves are stored that an evaluation reads.
    """
    state_avals, state_tree = jax.tree.flatten(state)
    array_avals, arrays_tree = jax.tree.flatten(arrays)
    num_state, mesh = len(state_avals), config.mesh
    first, signature = signature.state_names, signature.of_objects(static)

    def run(*leaves: Any) -> Any:
        given, others = jax.tree.unflatten(state_tree, leaves[:num_state]), leaves[num_state:]
        trees = jax.tree.unflatten(arrays_tree, others)
        try:
            outs = signature.call(step_fn, given, trees, static)
        except AsPytrees:
            leads = set(first) <= set(signature.state_names)
            raise Elsewhere(first if leads else signature.state_names) from None
        _objects.check_kept(trees, others)
        return outs

    @functools.wraps(step_fn, updated=())  # So that JAX's errors name the user's function.
    def flat_step(*leaves: Any, promotes: bool = False, reads: bool = True) -> Any:
        if config.evaluates and signature.takes_objects:
            return restored(run, *leaves).changed(leaves[:num_state])
        try:
            outs = run(*leaves)
        except Exception as error:
            _not_arrays.add_notes(error, arrays)
            raise
        if isinstance(outs, Mutated):
            _objects.check_no_state(signature.state_names, outs.result, arrays)
            return outs
        if config.evaluates or not reads:
            return outs
        if isinstance(outs, Filtered):
            return Filtered(read(outs.arrays, leaves, promotes), outs.static)
        return read(outs, leaves, promotes)

    def read(outs: Any, leaves: Sequence[Any], promotes: bool) -> Any:
        if signature.declared:
            outs = find_state(outs, state)
        else:
            _reading.read(signature, outs, state, arrays)
        if promotes:
            new = jax.tree.leaves(new_state(outs, state))
            _weak.check(leaves[: len(new)], new)
        return outs

    flat_step.__signature__ = _leaf_signature(state, first[0], arrays)  # type: ignore[attr-defined]
    may = any(aval.weak_type for aval in state_avals) and not config.evaluates
    flat = FlatStep(
        functools.partial(flat_step, promotes=True) if may else flat_step,
        functools.partial(flat_step, reads=False),
        state_avals, state_tree, arrays, array_avals, signature.specs, signature,
    )  # fmt: skip
    try:
        local = local_step(flat, config)
    except _weak.PromotedState as found:
        flat = promoted(dataclasses.replace(flat, fn=flat_step), found.state, config)
        local = local_step(flat, config)
    state = jax.tree.unflatten(state_tree, flat.state)

    plan, analysis = make_plan(local, state_leaves(state, config), config, stored)
    shardings, paths = shardings_of(plan.leaves, mesh), _call.argument_paths(arrays)
    runs = config.options.offload.program(plan, analysis, mesh, shardings, shared)
    written = runs.found
    movements = with_paths(written.movements, local.traced.out_tree)
    check_movements(movements, config.options.comm.max_gather_bytes)
    traced = local.traced.whole_batch or local.traced.frame
    return Program(
        written.described(plan),
        runs,
        local.traced.out_tree,
        shardings,
        [NamedSharding(mesh, spec) for spec in plan.arguments],
        tuple(path for path, key in zip(paths, local.keys, strict=True) if key),
        movements,
        local.whole_arguments,
        local.extra_work(*written.repeated(plan, analysis)),
        tuple(flat.state),
        functools.partial(as_traced, flat, config),
        tuple(x for x in traced.consts if isinstance(x, jax.core.Tracer)),
    )


def _leaf_signature(state: Any, root: str, arrays: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a function of all leaves, `(num, batch_x, ...)`, whose names JAX's errors use."""
    paths = [*_call.leaf_paths(state, root), *_call.argument_paths(arrays)]
    names = dict.fromkeys(["promotes"], "")
    for path in paths:
        name = re.sub(r"\W+", "_", path).strip("_")
        names[name if name.isidentifier() and name not in names else f"leaf{len(names)}"] = path
    kind, last = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.KEYWORD_ONLY
    leaves = [inspect.Parameter(name, kind) for name, path in names.items() if path]
    return inspect.Signature([*leaves, inspect.Parameter("promotes", last, default=False)])


def shardings_of(leaves: Sequence[LeafPlan], mesh: Any) -> list[NamedSharding]:
    """The sharding of each leaf as a JAX array; see `_MEMORY_KINDS`."""
    for tier in {leaf.tier for leaf in leaves} - {DEVICE}:
        check_tier(mesh, _MEMORY_KINDS.get(tier, tier))
    return [
        NamedSharding(
            mesh,
            _stored_layout.partition_spec(leaf.layout, leaf.automatic),
            memory_kind=_MEMORY_KINDS.get(leaf.tier, leaf.tier),
        )
        for leaf in leaves
    ]


@functools.cache
def check_tier(mesh: Any, tier: str) -> None:
    """Refuses a mesh whose devices have no such memory."""
    for device in mesh.local_devices if isinstance(mesh, Mesh) else ():
        kinds = [memory.kind for memory in device.addressable_memories()]
        if kinds and tier not in kinds:  # Devices of a topology, to compile for, list none.
            raise MeshError(message(
                WHO, f"{device} has the memory kinds {kinds}, and not {tier!r}",
                "Offloaded state is stored in a memory of the devices' host that they can copy from.",
                "Drop memory=, or use other devices."))  # fmt: skip
