"""`Placement`: where the state of a step rests, as the step itself and checkpoints of it ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding

from jzero._errors import MeshError, message
from jzero._memory_kinds import HOST
from jzero.offload.memory import _available, _placing
from jzero.offload.memory._padded import PaddedArray
from jzero.offload.memory._placing import Place
from jzero.processes import _agreement
from jzero.segments import _identity, _program
from jzero.segments._program import Program
from jzero.segments._programs import Programs
from jzero.segments._repeat import FlatCall, Repeat
from jzero.sharding.plan import _leaves, _make
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _call


class Placement:
    """Where the state of one step rests, by its programs or, before there is one, by its shapes.

    Attributes:
      programs: the step's.
    """

    def __init__(self, programs: Programs):
        self.programs = programs
        self._last: Repeat | None = None
        # Of the last plans and shardings: hundreds of leaves on the host take 0.7 ms.
        self._places: tuple[Any, Any, list[Place]] | None = None
        self._padded: tuple[Any, list[tuple[int, tuple[int, ...]]]] = ((), [])

    def leaf_plans(
        self, state: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> tuple[tuple[LeafPlan, ...], list[NamedSharding]]:
        """Where each leaf of the state rests, as far as it is known: see `ShardedTrainStep.state_shardings`.

        The shardings are those of leaves at rest, of the shape `LeafPlan.padded_shape`.
        """
        signature, setting = self.programs.signature, self.programs.setting
        state = signature.named(state, _call.WHO)
        abstract = _call.abstract(state, "state")
        plans: tuple[LeafPlan, ...] | None
        if args or kwargs:
            call = self.programs.bind(*signature.with_state(state, args, kwargs or {}))
            plans = self.programs.of(call).plan.leaves
        else:
            plans = self.programs.layout_of(abstract, setting)
        if plans is None:
            tier = self.programs.options.offload.tier
            leaves = _make.state_leaves(abstract, setting)
            plans = _leaves.plan_from_shapes(leaves, setting.stage_axes, tier)
        return plans, _program.shardings_of(plans, setting.mesh)

    def places(self, plans: Sequence[LeafPlan], shardings: Sequence[NamedSharding]) -> list[Place]:
        """Where each leaf of a state goes; from `leaf_plans` or a program."""
        self.check_devices("called")
        known = self._places
        if known is None or known[0] is not plans or known[1] is not shardings:
            axes: tuple[str, ...] = ()
            if self.programs.options.offload.tier == HOST:
                setting = self.programs.setting
                axes = (*setting.stage_axes.shard_axes, *setting.automatic)
            known = self._places = plans, shardings, _placing.places(plans, shardings, axes)
        return known[2]

    def check_devices(self, how: str) -> None:
        """Refuses what needs devices on a mesh that has none."""
        if not isinstance(self.programs.setting.mesh, Mesh):
            raise MeshError(message(
                _call.WHO, f"the mesh is abstract, and the step is {how}",
                "An AbstractMesh has no devices: it serves plan, describe and state_shardings.",
                "Use on_mesh(jax.make_mesh(...)); to compile for GPUs that are not there, "
                "jzero.target_mesh."))  # fmt: skip

    def place(
        self, state: Any, leaves: Sequence[Any], plans: Sequence[LeafPlan],
        shardings: Sequence[NamedSharding], who: str = "shard",
    ) -> list[Any]:  # fmt: skip
        """The leaves of `state` where the plan has them, padded; those that are None here stay None."""
        _placing.check_alive(state, leaves)
        places = self.places(plans, shardings)
        _placing.check_flushed(who, state, leaves, places)
        held = _placing.held_whole(leaves, shardings)
        num_bytes = _placing.host_bytes(places, leaves)
        if held or num_bytes:
            self.agree("shard", plans, num_bytes, lambda: {
                "values": [f"{plans[i].path} {_agreement.checksum(leaves[i])}" for i in held]
            })  # fmt: skip
        return _placing.place_state(leaves, places, held)

    def wrap(self, leaves: list[Any], plans: Sequence[LeafPlan]) -> list[Any]:
        """What a program returns as a user gets it; `_placing.wrap`, which looks at every leaf."""
        if self._padded[0] is not plans:
            padded = [
                (i, plan.shape)
                for i, plan in enumerate(plans)
                if plan.padding and plan.tier != HOST
            ]
            self._padded = plans, padded
        for i, shape in self._padded[1]:
            leaves[i] = PaddedArray(leaves[i], shape)
        return leaves

    def agree(
        self, who: str, plans: Sequence[LeafPlan], num_bytes: int,
        sections: Callable[[], _agreement.Sections],
    ) -> None:  # fmt: skip
        """Every process is about to make the same state, and each has `num_bytes` more for its part of it."""
        setting, shortage = self.programs.setting, _available.shortage(num_bytes)
        _agreement.agree(who, setting.mesh, lambda: {
            **_identity.of_state(setting, plans), "memory": [shortage or "enough"], **sections()
        })  # fmt: skip
        _available.check(who, shortage)

    def inputs(self, call: FlatCall) -> tuple[Program, list[Any], list[Any]] | None:
        """The program of a call, and state and arguments in their places; None under an outer `jax.jit`."""
        ready = self.repeated(call)
        if ready is None and call.is_traced:
            return None
        program, state = ready or self.ready(call)
        arrays = _placing.place(
            call.arrays, program.argument_shardings, lambda: _call.argument_paths(call.call.arrays)
        )
        return program, state, arrays

    def repeated(self, call: FlatCall) -> tuple[Program, list[Any]] | None:
        """The program of a call and its state in place, if the call is like the one before."""
        last = self._last
        state = None if last is None else last.state(call)
        if last is None or state is None:
            return None
        self.programs.agree_again(last.program, call.setting)
        return last.program, state

    def ready(self, call: FlatCall) -> tuple[Program, list[Any]]:
        """The same of any call: its program, on which all processes agree, and its state, placed."""
        program = self.programs.agreed(call.call, call.setting)
        plan, unread = program.plan, program.plan.unread
        leaves = [None if i in unread else x for i, x in enumerate(call.state)]
        shardings = program.state_shardings
        state = self.place(call.call.state, leaves, plan.leaves, shardings, _call.WHO)
        for i in unread:
            state[i] = call.state[i]
        self._last = Repeat.of(program, call, state)
        return program, state
