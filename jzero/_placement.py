# SPDX-License-Identifier: Apache-2.0
"""`Placement`: where the state of a step is stored; steps and checkpoints use it."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jzero._errors import BatchError, MeshError, OptionError, StateError, message
from jzero._memory_kinds import HOST, NVME, HostNeed
from jzero.offload.memory import _available, _placing, _writes
from jzero.offload.memory._file_storage import is_in_files
from jzero.offload.memory._filling import Filling
from jzero.offload.memory._leaf_array import LeafArray, is_coded, rows_of, storage_of
from jzero.offload.memory._nvme_store import StoreSpec
from jzero.offload.memory._placing import Place
from jzero.processes import _agreement
from jzero.segments import _identity, _program
from jzero.segments._dispatch_cache import CachedDispatch, FlatCall
from jzero.segments._program import Program
from jzero.segments._programs import Programs
from jzero.sharding.plan import _leaves, _make
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _call, _jax_state, _weak


class Placement:
    """Where the state of one step is stored: by its programs, or before there are any by its shapes."""

    def __init__(self, programs: Programs):
        self.programs = programs
        self._last: CachedDispatch | None = None
        # Those of the last plans and shardings: for hundreds of leaves on the host they take 0.7 ms.
        self._places: tuple[Any, Any, list[Place]] | None = None
        self._wrapped: tuple[Any, list[tuple[int, tuple[int, ...]]]] = ((), [])
        # Host memory that steps were granted while they run: the most of each kind.
        self._met = collections.Counter[tuple[str, str]]()

    def leaf_plans(
        self, state: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[tuple[LeafPlan, ...], list[NamedSharding]]:
        """The plan of each leaf as far as it is known (see `ShardedStep.state_shardings`), and its sharding.

        The shardings are those of stored leaves, of shape `LeafPlan.padded_shape`.
        """
        signature, config = self.programs.signature, self.programs.config
        plans: tuple[LeafPlan, ...] | None
        # weight_dtype depends on which leaves products read; a step of the state alone can be planned.
        alone = self.programs.options.weight_dtype is not None and signature.takes_state_alone
        if args or kwargs or alone:
            call = self.programs.bind(
                *self.programs.with_state(_call.WHO, state, args, kwargs or {})
            )
            plans = self.programs.of(call).plan.leaves
        else:
            # If jzero has found the state's arguments by itself, the user's may have another structure.
            fits = not signature.found or signature.is_state(state)
            named = signature.named(state, _call.WHO) if fits else state
            abstract = _call.abstract(named, "state")
            plans = self.programs.layout_of(abstract, config)
        if plans is None:
            backend, chosen = self.programs.options.offload, self.programs.options.weight_dtype
            if chosen is not None:
                raise OptionError(message(
                    "shard", f"weight_dtype={chosen}, and the step's other arguments are not known",
                    "Those weights are quantized that matrix products read, and the step says which.",
                    "Call eval_step.shard(state, *args), with arrays or jax.ShapeDtypeStruct."))  # fmt: skip
            leaves = _make.state_leaves(abstract, config)
            plans = _leaves.plan_from_shapes(
                leaves, config.stage_axes, backend.first_tier, backend.streams
            )
        return plans, _program.shardings_of(plans, config.mesh)

    def places(self, plans: Sequence[LeafPlan], shardings: Sequence[NamedSharding]) -> list[Place]:
        """The places for these plans and shardings; the last ones are remembered."""
        self.check_devices("called")
        known = self._places
        if known is None or known[0] is not plans or known[1] is not shardings:
            axes: tuple[str, ...] = ()
            if self.programs.options.offload.tier in (HOST, NVME):
                config = self.programs.config
                axes = _leaves.axes_away(plans, config.stage_axes.shard_axes)
            known = self._places = plans, shardings, _placing.places(plans, shardings, axes)
        return known[2]

    def check_devices(self, how: str) -> None:
        """Refuses an abstract mesh."""
        if not isinstance(self.programs.config.mesh, Mesh):
            raise MeshError(message(
                _call.WHO, f"the mesh is abstract, and the step is {how}",
                "An AbstractMesh has no devices: it serves plan, describe and state_shardings.",
                "Use on_mesh(jax.make_mesh(...)); to compile for GPUs that are not there, "
                "jzero.target_mesh."))  # fmt: skip

    def place(
        self, state: Any, leaves: Sequence[Any], plans: tuple[LeafPlan, ...],
        shardings: Sequence[NamedSharding], who: str = "shard", needs: Sequence[HostNeed] = (),
    ) -> list[Any]:  # fmt: skip
        """Puts the leaves where the plan stores them; leaves that are None stay None.

        Checks that the host has memory for them, and for what a step `needs` besides. Quantized leaves are
        returned as `LeafArray`.
        """
        _placing.check_alive(state, leaves, who)
        places = self.places(plans, shardings)
        _placing.check_flushed(who, state, leaves, places)
        self._check_codes(who, leaves, plans)
        errors = {i: x.lost for i, x in enumerate(leaves) if is_coded(x)}
        leaves = [*map(rows_of, leaves)]
        held = _placing.held_whole(leaves, shardings)
        needs = [*_placing.host_needs(places, leaves), *needs]
        if held or needs:
            self.agree(who, plans, needs, lambda: {
                "values": [f"{plans[i].path} {_agreement.checksum(leaves[i])}" for i in held]
            })  # fmt: skip
        filling = self.filling(plans, places, leaves)
        with filling or contextlib.nullcontext():
            if filling:
                filling.start([*map(_writes.of, leaves)])
            placed = _placing.place_state(leaves, places, held, filling, errors)
        if filling and not self.programs.config.evaluates:
            _writes.settle(placed)
        else:
            _writes.carry(leaves, placed)
        for i, lost in errors.items():
            form = plans[i].codes
            assert form is not None
            placed[i] = LeafArray(placed[i], form.shape, form, lost)
        return placed

    def _check_codes(self, who: str, leaves: Sequence[Any], plans: Sequence[LeafPlan]) -> None:
        """Refuses quantized leaves in training, and unquantized ones where `weight_dtype` was given."""
        pairs = list(zip(leaves, plans, strict=True))
        codes = [plan.path for x, plan in pairs if is_coded(x) and plan.codes is None]
        if codes:
            raise StateError(message(
                who, [f"{path} is quantized" for path in codes],
                "Training updates the exact values; quantization has rounded them.",
                "Train the original state, or call train_step.unshard(state) to dequantize it.",
                shown=4))  # fmt: skip
        exact = [plan.path for x, plan in pairs if x is not None and plan.codes and not is_coded(x)]
        if exact and who != "shard":
            raise StateError(message(
                who, [f"{path} is not quantized" for path in exact],
                f"weight_dtype={self.programs.options.weight_dtype} is the format in which weights are "
                "stored, so that the devices never hold them unquantized.",
                "Call state = eval_step.shard(state, *args) once, and keep what it returns.",
                shown=4))  # fmt: skip

    def filling(
        self,
        plans: tuple[LeafPlan, ...],
        places: Sequence[Place],
        leaves: Sequence[Any] | None = None,
    ) -> Filling | None:
        """New files for the leaves that are stored in files; None if none is, or all are written already."""
        config = self.programs.config
        away = [
            i for i, plan in enumerate(plans)
            if plan.tier == NVME and not (leaves and leaves[i] is None)
        ]  # fmt: skip
        if not away:
            return None
        spec: StoreSpec | None = config.options.offload.files_of(
            self.programs.step_of(plans), tuple(plans[i] for i in away),
            [places[i].sharding for i in away], config.stage_axes.shard_axes,
        )  # fmt: skip
        if spec is None:
            return None
        # An evaluation reads files wherever they are.
        kind = None if config.evaluates else spec
        if leaves and all(is_in_files(leaves[i], places[i].placement, kind) for i in away):
            return None
        there = {
            i: plan.path for i, plan in enumerate(plans) if leaves is None or leaves[i] is not None
        }
        return Filling(spec, there, away)

    def wrap(self, leaves: list[Any], plans: Sequence[LeafPlan]) -> list[Any]:
        """Like `_placing.wrap`, but remembers which leaves of the last plan need a `LeafArray`."""
        if self._wrapped[0] is not plans:
            wrapped = [
                (i, plan.shape)
                for i, plan in enumerate(plans)
                if plan.padding or plan.tier in (HOST, NVME)
            ]
            self._wrapped = plans, wrapped
        for i, shape in self._wrapped[1]:
            leaves[i] = LeafArray(leaves[i], shape)
        return leaves

    def agree(
        self, who: str, plans: Sequence[LeafPlan], needs: Sequence[HostNeed],
        sections: Callable[[], _agreement.Sections],
    ) -> None:  # fmt: skip
        """Checks across processes that all make the same state, and that each has the memory it `needs`."""
        config = self.programs.config
        shortage = _available.shortage(needs, config.mesh)
        memory = shortage.found if shortage else "enough"
        _agreement.agree(who, config.mesh, lambda: {
            **_identity.of_state(config, plans), "memory": [memory], **sections()
        })  # fmt: skip
        _available.check(who, shortage)

    def inputs(self, call: FlatCall) -> tuple[Program, list[Any], list[Any]] | None:
        """The program of a call, its placed state and its placed arguments; None under an outer `jax.jit`."""
        ready = self.repeated(call)
        # A step that was made under an outer `jax.jit` or `jax.grad` may close over its tracers.
        if ready is None and (
            call.is_traced or (_jax_state.is_tracing() and self.programs.of(call.call).closes_over)
        ):
            return None
        program, state = ready or self.ready(call)
        arrays = _placing.place(
            call.arrays, program.argument_shardings, lambda: _call.argument_paths(call.call.arrays)
        )
        return program, state, arrays

    def repeated(self, call: FlatCall) -> tuple[Program, list[Any]] | None:
        """Program and placed state if the call is like the one before; the fast path."""
        last = self._last
        state = None if last is None else last.state(call)
        if last is None or state is None:
            return None
        self.programs.agree_again(last.program, call.config)
        return last.program, state

    def ready(self, call: FlatCall) -> tuple[Program, list[Any]]:
        """Program, on which all processes agree, and placed state of any call."""
        _check_values(call)
        program = self.programs.agreed(call.call, call.config)
        plan, unread = program.plan, program.plan.unread
        leaves = [None if i in unread else x for i, x in enumerate(call.state)]
        leaves = _weak.strong(leaves, program.state)
        shardings = program.state_shardings
        # Host memory that it needs while it runs, beyond what an earlier step has been granted.
        more = [(need, need.nbytes - self._met[need[:2]]) for need in program.host_needs()]
        needs = [need._replace(nbytes=nbytes) for need, nbytes in more if nbytes > 0]
        placed = self.place(call.call.state, leaves, plan.leaves, shardings, _call.WHO, needs)
        state = [*map(storage_of, placed)]
        self._met.update({need[:2]: need.nbytes for need in needs})
        for i in unread:
            state[i] = storage_of(call.state[i])
        self._last = CachedDispatch.of(program, call, state)
        return program, state


def _check_values(call: FlatCall) -> None:
    """Refuses `ShapeDtypeStruct`s in a call."""
    for leaves, cls, paths_of in (
        (call.state, StateError, lambda: _call.leaf_paths(call.call.state, "state")),
        (call.arrays, BatchError, lambda: _call.argument_paths(call.call.arrays)),
    ):
        shapes = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
        if any(shapes):
            bad = itertools.compress(paths_of(), shapes)
            found = [f"{path} is a ShapeDtypeStruct" for path in bad]
            raise cls(message(
                _call.WHO, found, "A call runs, and needs values; shapes are for plan, describe, lower and "
                "state_shardings.", "Pass arrays; train_step.init(init_fn, key) makes a state in shards.",
                shown=4))  # fmt: skip
