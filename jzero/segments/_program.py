"""Builds the program of one step for given shapes: trace, analyse, plan, and the function that runs it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jzero._errors import MeshError, OptionError, message
from jzero._memory_kinds import DEVICE, HOST, PINNED
from jzero.offload import _slices, _tiers
from jzero.offload._hosted import Engines, HostedStep
from jzero.offload._offloaded import OffloadedStep
from jzero.offload._policy import HostCPU, PinnedHost
from jzero.segments._parts import Parts
from jzero.sharding.analysis._links import Links
from jzero.sharding.analysis._needs import note_needs
from jzero.sharding.batch import _trace
from jzero.sharding.batch._body import Movement
from jzero.sharding.cut import _pieces
from jzero.sharding.cut._kept import Loops
from jzero.sharding.cut._pieces import UpdatePart
from jzero.sharding.plan import _layout, _plan
from jzero.sharding.plan._local_step import FlatStep, local_step
from jzero.sharding.plan._plan import Leaf, LeafPlan, Plan, Turn
from jzero.sharding.plan._setting import Setting
from jzero.sharding.run._run import Runner
from jzero.tracing import _call

WHO = _call.WHO
# While one is copied to the devices, one is updated and one is copied back.
TURNS_AT_ONCE = 3
# JAX's names of the tiers that have another one; of what is no JAX array, where it rests on the way.
_MEMORY_KINDS = {DEVICE: None, HOST: PINNED}


@dataclasses.dataclass(frozen=True)
class Program:
    """One step for one set of shapes.

    Attributes:
      plan: where the state rests.
      run: the step on flat lists, `(state leaves, argument leaves) -> (state leaves, outputs)`.
      step: the same, compiled, the state donated: one `jax.jit` function, or several in an
        `OffloadedStep` or a `HostedStep`.
      out_tree: structure of what the step returns; the state's leaves come first.
      state_shardings: one per leaf of the state.
      argument_shardings: one per leaf of the other arguments.
      keys: paths of the arguments taken for PRNG keys, of a step with collectives of its own.
      movements: rows of the batch that operations move.
      whole_arguments: arguments with rows that come whole to every device, which do not divide them.
      loops: over the microbatches, if there are any.
    """

    plan: Plan
    run: Callable[..., Any]
    step: Any
    out_tree: Any
    state_shardings: list[NamedSharding]
    argument_shardings: list[NamedSharding]
    keys: tuple[str, ...]
    movements: tuple[Movement, ...] = ()
    whole_arguments: tuple[str, ...] = ()
    loops: Loops | None = None


def state_leaves(state: Any, setting: Setting) -> list[Leaf]:
    """What the plan must know of an abstract state."""
    paths = _call.leaf_paths(state, "state")
    leaves = jax.tree.leaves(state)
    specs = setting.options.automatic(paths, [leaf.shape for leaf in leaves], setting.automatic)
    return [
        Leaf(
            path,
            tuple(leaf.shape),
            str(leaf.dtype),
            getattr(leaf.dtype, "itemsize", 4),
            splittable=not _call.is_key(leaf.dtype, leaf.shape),
            floating=_trace.is_float(leaf),
            automatic=spec,
            parts=math.prod(setting.automatic[axis] for axes in spec for axis in axes),
        )
        for path, leaf, spec in zip(paths, leaves, specs, strict=True)
    ]


def build(
    step_fn: Callable[..., Any], signature: _call.Signature, setting: Setting, state: Any,
    arrays: dict[str, Any], static: tuple[tuple[str, Any], ...], engines: Engines,
) -> Program:  # fmt: skip
    """Traces the step, decides what goes where, and returns the program that does it.

    Args:
      step_fn: the user's step.
      signature: how it is called.
      setting: stage and mesh.
      state: the state's tree of `ShapeDtypeStruct`s.
      arrays: the same for every other argument, by name.
      static: the static arguments.
      engines: of this step's other programs, on the host.
    """
    state_avals, state_tree = jax.tree.flatten(state)
    array_avals, arrays_tree = jax.tree.flatten(arrays)
    num_state = len(state_avals)

    def flat_step(*leaves: Any) -> Any:
        return signature.call(
            step_fn,
            jax.tree.unflatten(state_tree, leaves[:num_state]),
            jax.tree.unflatten(arrays_tree, leaves[num_state:]),
            static,
        )

    flat = FlatStep(flat_step, state_avals, state_tree, arrays, array_avals, signature.specs)
    local = local_step(flat, setting)
    traced, options = local.traced, setting.options
    frame = traced.frame
    leaves = state_leaves(state, setting)
    links = Links(frame, setting.sharding.count(setting.sharding.shard_axes))
    note_needs(frame, len(traced.out_avals))
    plans = _plan.plan_leaves(leaves, setting.sharding, frame, links)
    resting, update = _tiers.decide(plans, frame, setting)
    plan = Plan(
        options.stage,
        tuple(setting.axes.items()),
        traced.reductions,
        resting,
        options.accumulate,
        options.reduce_once,
    )
    runner = Runner(
        setting, plan.leaves, traced, links, local.specs, local.outputs, update.apart, update.boundary
    )  # fmt: skip
    state_shardings = shardings_of(plan.leaves, setting.mesh)
    plan, run, step = _runs(runner, plan, update, state_shardings, engines)
    return Program(
        plan,
        run,
        step,
        traced.out_tree,
        state_shardings,
        [NamedSharding(setting.mesh, spec) for spec in local.specs],
        tuple(
            path for path, key in zip(_call.argument_paths(arrays), local.keys, strict=True) if key
        ),
        traced.movements,
        local.whole_arguments,
        runner.cut.loops if runner.cut else None,
    )


def _runs(
    runner: Runner, plan: Plan, update: UpdatePart, shardings: list[NamedSharding], engines: Engines
) -> tuple[Plan, Callable[..., Any], Any]:
    """The plan, the step as a function of whole arrays, and compiled, as the policy has it."""
    policy = runner.setting.options.offload
    if isinstance(policy, PinnedHost):
        return _streamed(runner, plan, update, policy, shardings)
    if isinstance(policy, HostCPU):
        hosted = HostedStep(runner, update, policy, shardings, engines)
        return plan, hosted.run, hosted
    run = runner.whole_step()
    # Else XLA would choose over the automatic axes, and the next step would move the state back.
    options: dict[str, Any] = {"out_shardings": (shardings, None)}
    step = jax.jit(run, donate_argnums=0, **(options if runner.setting.automatic else {}))
    return plan, run, step


def _streamed(
    runner: Runner, plan: Plan, update: UpdatePart, policy: PinnedHost,
    shardings: list[NamedSharding],
) -> tuple[Plan, Callable[..., Any], Any]:  # fmt: skip
    """The update on the devices, in turns."""
    sizes = [leaf.nbytes_per_device for leaf in plan.leaves]
    packs = _pieces.pack(update.pieces, sizes, policy.device_bytes // TURNS_AT_ONCE)
    parts = Parts(runner, update, packs, shardings)
    turns = [_turn(parts, pack, sizes, policy.device_bytes) for pack in packs]
    _check_room(parts, turns, policy.device_bytes)
    step = OffloadedStep(parts, turns, policy.device_bytes, shardings)
    plan = dataclasses.replace(plan, turns=tuple(turns), device_bytes=policy.device_bytes)
    return plan, step.run, step


def _turn(
    parts: Parts, pack: Sequence[_pieces.Piece], sizes: Sequence[int], device_bytes: int
) -> Turn:
    """A pack's turn, in slices if its leaves are so large that two would not be on the devices together."""
    nbytes, most = _pieces.nbytes_of(pack, sizes), device_bytes // TURNS_AT_ONCE
    paths = tuple(parts.runner.leaves[i].path for i in _pieces.leaves_of(pack))
    found = None
    if nbytes > most and len(pack) == 1:
        found = _slices.slices_of(parts, pack[0], nbytes, most)
    return Turn(paths, nbytes, *(found or (1, nbytes)))


def _check_room(parts: Parts, turns: Sequence[Turn], device_bytes: int) -> None:
    bad = [
        f"{', '.join(turn.leaves[:3])}{', ...' if len(turn.leaves) > 3 else ''}: {turn.nbytes_at_once} bytes "
        f"on each device at once ({_slices.obstacle(parts, pack[0]) or 'one row of them'})"
        for turn, pack in zip(turns, parts.packs, strict=True)
        if turn.nbytes_at_once > device_bytes
    ]
    if bad:
        raise OptionError(message(
            WHO, bad, f"Leaves whose updates depend on each other visit the devices together, and "
            f"device_bytes={device_bytes} is the most that may be there.",
            f"Use PinnedHost(device_bytes={max(turn.nbytes_at_once for turn in turns)}) or more.",
            things="groups of leaves", shown=6))  # fmt: skip


def shardings_of(leaves: Sequence[LeafPlan], mesh: Any) -> list[NamedSharding]:
    """Where each leaf rests, for JAX; of one that is no JAX array at rest, where it is on the way there.

    Raises:
      MeshError: the devices have no such memory.
    """
    for tier in {leaf.tier for leaf in leaves} - {DEVICE}:
        check_tier(mesh, _MEMORY_KINDS.get(tier, tier))
    return [
        NamedSharding(
            mesh,
            _layout.partition_spec(leaf.layout, leaf.automatic),
            memory_kind=_MEMORY_KINDS.get(leaf.tier, leaf.tier),
        )
        for leaf in leaves
    ]


@functools.cache
def check_tier(mesh: Any, tier: str) -> None:
    """Refuses a mesh whose devices have no memory of that kind; an abstract one has no devices."""
    for device in mesh.local_devices if isinstance(mesh, Mesh) else ():
        kinds = [memory.kind for memory in device.addressable_memories()]
        if kinds and tier not in kinds:  # Those of a topology, to compile for, list none.
            raise MeshError(message(
                WHO, f"{device} has the memories {kinds}, and none of kind {tier!r}",
                "Offloaded state rests in a memory of the devices' host that they can copy from.",
                "Drop offload, or use other devices."))  # fmt: skip
