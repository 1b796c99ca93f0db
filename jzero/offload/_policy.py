# SPDX-License-Identifier: Apache-2.0
"""The policies of `memory=`: one frozen type for each memory, no offload being one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, ClassVar

from jax.sharding import Mesh, NamedSharding

from jzero._errors import OptionError, message
from jzero._memory_kinds import DEVICE, HOST, PINNED
from jzero._quantities import make_int
from jzero.offload import _tiers
from jzero.offload._host_step import HostStep
from jzero.offload._slicing import Slicer
from jzero.offload._streamed import StreamedStep
from jzero.segments._planned import PlannedStep
from jzero.segments._whole import WholeStep
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut._subgraphs import UpdatePart
from jzero.sharding.plan._boundary import Boundary
from jzero.sharding.plan._offload import Leaves, Offload, Shared, StepProgram
from jzero.sharding.plan._plan import Analysis, StepPlan, Turn
from jzero.sharding.plan._stages import StageAxes

_DELAY_AFTER = 40  # ZeRO-Offload, section 5.2


@dataclasses.dataclass(frozen=True)
class NoOffload(Offload):
    """Everything rests on the devices; the default of `shard_train_step`."""

    tier: ClassVar[str] = DEVICE

    def rest(
        self,
        leaves: Leaves,
        frame: Frame,
        mesh: Mesh,
        stage_axes: StageAxes,
    ) -> tuple[Leaves, UpdatePart]:
        """All leaves on the devices, and no update part."""
        return leaves, UpdatePart((), ())

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """None: the update is part of the step's one program."""
        return ()

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> WholeStep:  # fmt: skip
        """The step as one program."""
        return WholeStep(PlannedStep(plan, analysis, mesh), shardings)


@dataclasses.dataclass(frozen=True)
class PinnedHost(Offload):
    """Optimizer state rests in the pinned memory of the devices' host, and is updated on the devices.

    A step computes gradients, and then works through the optimizer state in pieces::

        for piece in pieces:                         # so many at a time that they fit in device_bytes
            moments = copy(piece, host -> device)    # while the piece before is updated
            params, moments = update(gradients, params, moments)
            copy(moments, device -> host)            # while the next piece is updated

    Device memory: `device_bytes` in place of the optimizer state; gradients, in shards, wait for their turn.
    Traffic between device and host, in each step: the optimizer state, to the device once for each level of
    the update that reads it (one, unless something like the norm of all updates scales them), and back once.
    For Adam on float32 that is 16 bytes per parameter of a device's shard.

    A conditional update (`optax.MultiSteps`, `optax.apply_if_finite`) is one piece of all leaves, which must
    fit into `device_bytes`. The step cannot be part of an outer `jax.jit`; `jax.eval_shape` counts as one.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = optax.adam(1e-2)
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> train_step = jzero.shard_train_step(step_fn, memory=jzero.PinnedHost(device_bytes=2**20))
    >>> w = jnp.ones((64, 64))
    >>> params, opt_state = train_step((w, tx.init(w)), jnp.ones((8, 64)))
    >>> params.sharding.memory_kind, opt_state[0].mu.sharding.memory_kind
    ('device', 'pinned_host')

    Outside of a step its leaves are JAX's own arrays in host memory, which JAX does not compute with beside
    arrays of a device: `train_step.unshard(state)`, or a step of `jzero.shard_eval_step`, brings them there.

    Attributes:
      device_bytes: the most bytes of optimizer state on each device at any time, while a step runs. A third
        of it is a piece's size, so that one is copied in, one updated and one copied out at the same time.
    """

    device_bytes: int = 2**30
    tier: ClassVar[str] = PINNED

    def __post_init__(self) -> None:
        make_int(
            self, "PinnedHost", "device_bytes", 1, None,
            "It is how many bytes of optimizer state may be on a device at a time, an int from 1.",
            "Use device_bytes=2**30, or drop it.",
        )  # fmt: skip

    @property
    def visiting_bytes(self) -> int:
        """Bytes of optimizer state on each device at any time: `device_bytes`."""
        return self.device_bytes

    def rest(
        self,
        leaves: Leaves,
        frame: Frame,
        mesh: Mesh,
        stage_axes: StageAxes,
    ) -> tuple[Leaves, UpdatePart]:
        """Optimizer state in pinned memory."""
        return _tiers.offloaded(self, leaves, frame, stage_axes)

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """As many pieces at a time as there is room for."""
        return Slicer(leaves, frame, update, boundary, self.device_bytes).turns()

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """The grad part, and then turn after turn."""
        return StreamedStep(PlannedStep(plan, analysis, mesh), shardings)


@dataclasses.dataclass(frozen=True)
class HostCPU(Offload):
    """Optimizer state rests in the memory of the devices' host, and is updated there by its processors.

    Gradients go down, new parameters come up; moments and masters never leave the host::

        gradients = grad part(parameters, batch)     # each goes to the host when it is reduced
        for chunk in chunks:                         # on the host, in place, one pass over memory
            moments, parameters = update(moments, gradients)
            copy(parameters, host -> device)         # while the next chunk is updated

    Each process updates the shards of its own devices, by kernels generated from the step's own update: any
    optimizer whose update treats every element alike (all of Adam's kin, with schedules, masks, clipping,
    weight decay) runs at the speed of the host's memory; what does not is left to XLA's CPU backend, and
    `describe` says which leaf goes by which road, and why. LLVM compiles the kernels: `pip install
    jzero[offload]`. Where it is not installed XLA does, with the same numbers, in about 5 times the time.

    Traffic per step and device, for Psi parameters in its shard: 2 Psi bytes down and 2 Psi up with bfloat16
    parameters and `jzero.master_weights`, the least there can be (ZeRO-Offload, section 4). Parameters that
    the update itself reads (float32 ones without masters) go down, too. What follows from gradients alone
    (their norm, finiteness) is computed on the devices, and crosses as a few scalars.

    Memory: 2 Psi bytes at rest on each device in place of 14 Psi (masters and both moments of Adam, 12 Psi,
    are on the host), and gradients while a step runs. On the host also pinned memory for what is on its way:
    2 Psi of gradients and 2 Psi of parameters (twice both with `delayed_update`).

    An update that needs other devices' shards (the norms of LAMB, Adafactor's means) is refused by name on
    more than one device; `PinnedHost` can do it. If a step fails before the host (with a `ratio`, before the
    devices) has begun to overwrite state, the state is as before; after that, it is consumed. If parameters
    rest on the hosts, too (`Memory(params=)`), the host begins while the devices still compute.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = jzero.master_weights(optax.adamw(1e-2))
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> train_step = jzero.shard_train_step(step_fn, memory=jzero.HostCPU())
    >>> w, batch = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    >>> w, opt_state = train_step((w, tx.init(w)), batch)
    >>> opt_state.masters
    LeafArray(shape=(64, 64), dtype=float32, in host memory)
    >>> [(x.direction, x.dtype, x.elements) for x in train_step.describe((w, opt_state), batch).crossings
    ...  if x.elements > 1]  # of one of 8 devices
    [('to host', 'bfloat16', 512), ('to device', 'bfloat16', 512)]

    Attributes:
      delayed_update: whether the host applies the gradients of one step while the devices compute those of
        the next, so that neither waits for the other: what the batch makes of a gradient is of parameters
        that lack exactly the update before (the one-step delayed parameter update of ZeRO-Offload, section
        5.2). Terms of parameters alone, weight decay or an L2 term of the loss, are of them as they are when
        the host updates. What rests on the devices (scalars, leaves below `min_shard_bytes`, a `ratio`'s
        share) is never stale. It costs
        loss at large learning rates (experiments/offload/delayed): compare before you rely on it. A state
        waits for its last gradients until `train_step.flush(state)`: before a checkpoint, and at the end.
      delay_after: how many steps are not delayed, so that a training has left its first steps, in which
        gradients change fast; 40 by default, as in the paper. Counted since the state was placed or restored.
      ratio: the share of optimizer state, by bytes, that rests on the host, above 0 and up to 1; the rest
        rests on the devices and is updated there at the same time (Twin-Flow of ZeRO-Offload++). Leaves that
        are updated together rest together; `describe` says what share that gives. 'auto' measures host,
        device and the way between them once (about a second), and chooses the share with which both end
        together; one process only.
      threads: how many threads update; by default one for each processor that this process may use, and two
        fewer where more than four are there. Several processes on one host should share them.

    Reference:
      Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model Training", 2021.
    """

    delayed_update: bool = False
    delay_after: int | None = None
    ratio: float | str = 1.0
    threads: int | None = None
    tier: ClassVar[str] = HOST

    def __post_init__(self) -> None:
        if not isinstance(self.delayed_update, bool):
            raise OptionError(message(
                "HostCPU", f"delayed_update={self.delayed_update!r}", "It is True or False.",
                "Use delayed_update=True to let host and devices work at the same time."))  # fmt: skip
        if self.delay_after is not None:
            make_int(
                self, "HostCPU", "delay_after", 0, None,
                "It is the number of steps that are not delayed, an int from 0.",
                "Use delay_after=40, or drop it.",
            )  # fmt: skip
            if not self.delayed_update:
                raise OptionError(message(
                    "HostCPU", f"delay_after={self.delay_after!r} without delayed_update",
                    "It is the number of steps before updates are delayed.",
                    "Drop it, or use delayed_update=True."))  # fmt: skip
        if self.ratio != "auto":
            share = _float(self.ratio)
            if share is None or not 0 < share <= 1:
                raise OptionError(message(
                    "HostCPU", f"ratio={self.ratio!r}",
                    "It is the share of optimizer state that rests on the host, by bytes: above 0, up to 1.",
                    "Use a number in this range, 'auto', or drop it."))  # fmt: skip
            object.__setattr__(self, "ratio", share)
        if self.threads is not None:
            make_int(
                self, "HostCPU", "threads", 1, None, "It is how many threads update, an int from 1.",
                "Drop it to use all processors that this process may use.",
            )  # fmt: skip

    @property
    def share(self) -> Fraction | None:
        """The share of optimizer state that rests on the host: `ratio`; None for 'auto'."""
        return None if self.ratio == "auto" else Fraction(str(self.ratio))

    @property
    def waits(self) -> bool:
        """Whether gradients of a step wait for the next one: `delayed_update`."""
        return self.delayed_update

    def rest(
        self,
        leaves: Leaves,
        frame: Frame,
        mesh: Mesh,
        stage_axes: StageAxes,
    ) -> tuple[Leaves, UpdatePart]:
        """Optimizer state on the hosts, but for what `ratio` leaves on the devices."""
        resting, update = _tiers.offloaded(self, leaves, frame, stage_axes)
        if self.delayed_update:
            _tiers.check_delayed(leaves, frame, update)
        measured = self.ratio == "auto"
        ratio = (
            _tiers.measured_share(resting, mesh, stage_axes, self.threads)
            if measured
            else float(self.ratio)
        )
        return _tiers.shared(resting, update, ratio, measured), update

    def turns(
        self, leaves: Leaves, frame: Frame, update: UpdatePart, boundary: Boundary
    ) -> tuple[Turn, ...]:
        """What the host updates, and what rests on the devices."""
        return _tiers.turns(leaves, update)

    def program(
        self, plan: StepPlan, analysis: Analysis, mesh: Mesh, shardings: Sequence[NamedSharding],
        shared: Shared,
    ) -> StepProgram:  # fmt: skip
        """Gradients on the devices, their update on the host."""
        delays = self.delays if self.delayed_update else None
        planned = PlannedStep(plan, analysis, mesh)
        return HostStep(planned, shardings, self.threads, delays, shared)

    def delays(self, num_steps: int) -> bool:
        """Whether the update of a step is delayed that has so many steps before it."""
        after = _DELAY_AFTER if self.delay_after is None else self.delay_after
        return self.delayed_update and num_steps >= after


def _float(x: Any) -> float | None:
    """A float, of NumPy's, too; None if it is none."""
    if isinstance(x, bool | str):
        return None
    try:
        return float(x)
    except (TypeError, ValueError):
        return None


NO_OFFLOAD = NoOffload()


_NAMED: dict[str, Callable[[], Offload]] = {
    "device": NoOffload,
    "pinned_host": PinnedHost,
    "host": HostCPU,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Which memory holds what; a policy alone, `memory=jzero.HostCPU()`, is that of optimizer state.

    A string stands for a policy as it is by default: 'device' for `jzero.NoOffload()`, 'pinned_host' (as in
    JAX's memory kinds) for `jzero.PinnedHost()`, 'host' for `jzero.HostCPU()`.

    With anything off the devices a step is several programs: it cannot be called under an outer `jax.jit`
    or lowered, and one that fails while it runs (out of memory, not a refused batch) may have consumed part
    of its state. Scalars, leaves below `Axes.min_shard_bytes`, and what is read with the batch stay on the
    devices.

    >>> import jzero
    >>> jzero.Memory(params=jzero.PinnedHost(device_bytes=2**31), optimizer="host").optimizer
    HostCPU(delayed_update=False, delay_after=None, ratio=1.0, threads=None)

    Attributes:
      params: where parameters are stored, at stage 3. `PinnedHost(device_bytes=...)`: in pinned memory, each
        device's shard with its own host (ZeRO-Infinity). The step runs layer by layer: a layer's shards are
        fetched while the layer before computes, its gradients leave when they are reduced, and never are
        more than `device_bytes` of parameters, gathered ones included, on a device. Loops over layers run
        iteration by iteration, unrolled models in parts that fit. With `optimizer=HostCPU()` the host
        updates parameters in place, layer by layer, while earlier layers compute their backward pass, and
        nothing else crosses; else parameters and gradients visit the devices for the update, in shards:
        within `device_bytes`, or with their optimizer state within that of `optimizer=PinnedHost(...)`.
        Traffic to each device: its shards once in each pass. `NVMe(path, device_bytes=..., host_bytes=...)`,
        with `optimizer=NVMe(path)`: in the files of the optimizer state, from where they are read ahead of
        their layers, and where they are updated. Microbatches, and other loops around layers, keep what they
        read of parameters if `device_bytes` has room for it; else each iteration fetches it again, but see
        `Microbatches.order`. Refused with `Comm(prefetch_bytes=)`, another `Comm(gather=)`, different
        `Axes(params=)` and `Axes(optimizer=)`, and `HostCPU`'s `ratio` and `delayed_update`.
      optimizer: where optimizer state is stored. `PinnedHost(device_bytes=...)`: in pinned memory; each step
        copies it to the devices and back in buckets, at most `device_bytes` of it at a time. `HostCPU(...)`:
        in the host's memory, updated there by its processors; only gradients and parameters cross.
        `NVMe(path, host_bytes=...)`: in files, updated there, too, chunk by chunk, with at most `host_bytes`
        of it in each process's memory.
      activations: where activations wait for the backward pass. `PinnedHost()`: in pinned memory. What a
        loop over layers saves for the backward pass leaves iteration by iteration, and comes back one
        iteration before it is needed; so do values that unrolled layers save. Below 1 MiB (of an
        iteration's slice, or a value, on one device) they stay. With `jax.checkpoint` around the layers
        these are the layers' inputs. It costs their bytes of traffic in each direction, beside the compute,
        and of the host's memory. With `params` off the devices they move between the programs of layers:
        those of the layer that runs, and of two more, are on a device, beside `device_bytes`. On GPUs it
        needs JAX 0.11.1, unless `params` is off the devices and there are no microbatches. A step's own
        checkpoint policies (`save_and_offload_only_these_names`) work with and without it.

    Raises:
      OptionError: a field that is no policy.

    Reference:
      Ren et al.: "ZeRO-Offload", 2021 (`optimizer`). Rajbhandari et al.: "ZeRO-Infinity: Breaking the GPU
      Memory Wall for Extreme Scale Deep Learning", 2021 (`params`, `activations`, `NVMe`).
    """

    params: Offload | str = NO_OFFLOAD
    optimizer: Offload | str = NO_OFFLOAD
    activations: Offload | str = NO_OFFLOAD

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            policy = _policy("Memory", field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, policy)


def memory_of(who: str, given: Any, short: str = "optimizer") -> Memory:
    """`memory=`: a group, or a policy of what `short` names.

    Raises:
      OptionError: it is neither.
    """
    if isinstance(given, Memory | None):
        return given or Memory()
    return Memory(**{short: _policy(who, "memory", given)})


def _policy(who: str, name: str, given: Any) -> Offload:
    if isinstance(given, Offload):
        return given
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    raise OptionError(message(
        who, f"{name}={given!r}", f"It is a policy, or one of {', '.join(map(repr, _NAMED))}.",
        f"Write {name}=jzero.PinnedHost(), or drop it."))  # fmt: skip
