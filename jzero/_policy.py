# SPDX-License-Identifier: Apache-2.0
"""Policies: which memory holds optimizer state, parameters and activations. They are only data."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jzero._errors import OptionError, message
from jzero._given_fields import GivenFields

_LEAST_BYTES = 2**16  # of the host's memory, for tiles
_THREADS = (
    "It is how many threads update, an int from 1.",
    "Drop it to use all processors that this process may use.",
)


class Policy(GivenFields):
    """Which memory holds something. What a step does about it is up to a `Backend`."""


@dataclasses.dataclass(frozen=True, repr=False)
class NoOffload(Policy):
    """Everything is stored on the devices; the default of `shard_train_step`."""


@dataclasses.dataclass(frozen=True, repr=False)
class PinnedHost(Policy):
    """Optimizer state is stored in the pinned memory of the devices' host, and is updated on the devices.

    A step computes gradients, and then works through the optimizer state in buckets::

        for bucket in buckets:                       # so many at a time that they fit in device_bytes
            moments = copy(bucket, host -> device)   # while the bucket before is updated
            params, moments = update(gradients, params, moments)
            copy(moments, device -> host)            # while the next bucket is updated

    Device memory: `device_bytes` in place of the optimizer state; sharded gradients wait for their bucket.
    Traffic between device and host, in each step: the optimizer state, to the device once for each pass over
    it (one, unless something like the norm of all updates scales them), and back once. For Adam on float32
    that is 16 bytes per parameter of a device's shard.

    A conditional update (`optax.MultiSteps`, `optax.apply_if_finite`) is one bucket of all leaves, which must
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
        of it is a bucket's size, so that one is copied in, one updated and one copied out at the same time.
    """

    device_bytes: int = 2**30

    def __post_init__(self) -> None:
        self._make_int(
            "device_bytes", 1,
            "It is how many bytes of optimizer state may be on a device at a time, an int from 1.",
            "Use device_bytes=2**30, or drop it.")  # fmt: skip


@dataclasses.dataclass(frozen=True, repr=False)
class HostCPU(Policy):
    """Optimizer state is stored in the memory of the devices' host, and is updated there by its processors.

    Gradients go down, new parameters come up; moments and masters never leave the host::

        gradients = forward_backward(parameters, batch)  # each goes to the host when it is reduced
        for chunk in chunks:                         # on the host, in place, one pass over memory
            moments, parameters = update(moments, gradients)
            copy(parameters, host -> device)         # while the next chunk is updated

    Each process updates the shards of its own devices, by kernels generated from the step's own update: any
    optimizer whose update treats every element alike (all of Adam's kin, with schedules, masks, clipping,
    weight decay) runs at the speed of the host's memory; what does not is left to XLA's CPU backend, and
    `describe` says which leaf goes by which code path, and why. LLVM compiles the kernels: `pip install
    jzero[offload]`. Where it is not installed XLA does, with the same numbers, in about 5 times the time.

    Traffic per step and device, for Psi parameters in its shard: 2 Psi bytes down and 2 Psi up with bfloat16
    parameters and `jzero.master_weights`, the least there can be (ZeRO-Offload, section 4). Parameters that
    the update itself reads (float32 ones without masters) go down, too. What follows from gradients alone
    (their norm, finiteness) is computed on the devices, and sent as a few scalars.

    Memory: 2 Psi bytes on each device between steps in place of 14 Psi (masters and both moments of Adam, 12
    Psi, are on the host), and gradients while a step runs. On the host also pinned memory for what is on its
    way: 2 Psi of gradients and 2 Psi of parameters (twice both with `delayed_update`).

    An update that needs other devices' shards (the norms of LAMB, Adafactor's means) is refused by name on
    more than one device; `PinnedHost` can do it. If a step fails before the host (with a `ratio`, before the
    devices) has begun to overwrite state, the state is as before; after that, it is consumed. If parameters
    are stored on the hosts, too (`Memory(params=)`), the host begins while the devices still compute.

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
    >>> [(x.direction, x.dtype, x.elements) for x in train_step.describe((w, opt_state), batch).transfers
    ...  if x.elements > 1]  # of one of 8 devices
    [('to host', 'bfloat16', 512), ('to device', 'bfloat16', 512)]

    Attributes:
      delayed_update: whether the host applies the gradients of one step while the devices compute those of
        the next, so that neither waits for the other: what the batch makes of a gradient is of parameters
        that lack exactly the update before (the one-step delayed parameter update of ZeRO-Offload, section
        5.2). Terms of parameters alone, weight decay or an L2 term of the loss, are of them as they are when
        the host updates. What is stored on the devices (scalars, leaves below `min_shard_bytes`, a `ratio`'s
        share) is never stale. It costs loss at large learning rates (experiments/offload/delayed): compare
        before you rely on it. A state waits for its last gradients until `train_step.flush(state)`: before a
        checkpoint, and at the end.
      delay_after: how many steps are not delayed, so that a training has left its first steps, in which
        gradients change fast; 40 by default, as in the paper. Counted since the state was placed or restored.
      ratio: the share of optimizer state, by bytes, that is stored on the host, above 0 and up to 1; the rest
        is on the devices and is updated there at the same time (Twin-Flow of ZeRO-Offload++). Leaves that
        are updated together are stored together; `describe` says what share that gives. 'auto' measures host,
        device and their link once (about a second), and chooses the share with which both end
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

    def __post_init__(self) -> None:
        self._check_bools("delayed_update")
        self._make_int("delay_after", 0, "It is the number of steps that are not delayed, an int from 0.",
                       "Use delay_after=40, or drop it.")  # fmt: skip
        if self.delay_after is not None and not self.delayed_update:
            raise self._refused(
                f"delay_after={self.delay_after!r} without delayed_update",
                "It is the number of steps before updates are delayed.",
                "Drop it, or use delayed_update=True.")  # fmt: skip
        if self.ratio != "auto":
            share = _float(self.ratio)
            if share is None or not 0 < share <= 1:
                raise self._refused(
                    f"ratio={self.ratio!r}",
                    "It is the share of optimizer state stored on the host, by bytes: above 0, up to 1.",
                    "Use a number in this range, 'auto', or drop it.")  # fmt: skip
            object.__setattr__(self, "ratio", share)
        self._make_int("threads", 1, *_THREADS)


@dataclasses.dataclass(frozen=True, repr=False)
class NVMe(Policy):
    """Optimizer state is stored in files, on NVMe disks, and updated tile by tile by the host's processors.

    A tile is one range of elements of all leaves that are updated together. A step reads, updates and writes
    tile after tile, all three at the same time, in few buffers::

        gradients = forward_backward(parameters, batch)  # each goes to the host when it is reduced
        for tile in tiles:
            moments, masters = read(tile)            # ahead, in other threads
            moments, masters, parameters = update(moments, masters, gradients)
            write(tile)                              # behind, in other threads
            copy(parameters, host -> device)
        commit                                       # now the new state counts, and the old one is consumed

    Each process has a file for each of its devices, for that device's shards. The update is that of
    `jzero.HostCPU`, to the bit, by the same kernels (best with `pip install jzero[offload]`), for leaves that
    are updated element by element; what is not (Adafactor's factored moments, Muon's products) is refused by
    name, as are updates that need other devices' shards.

    Traffic per step and device, for Psi parameters in its shard: as with `HostCPU` between device and host,
    and between host and disk the whole optimizer state each way: 12 Psi bytes read and 12 Psi written for
    Adam with masters. `jzero.estimate(..., memory=jzero.NVMe(path), rates=jzero.Rates(disk="6GB/s", ...))`
    has the time that takes, and what is written in a day, which wears a disk out.

    Memory: on each device as with `HostCPU`, and the new parameters beside the old ones until all is
    written. On the host `host_bytes` of each process, and pinned memory for gradients and parameters on
    their way (2 Psi bytes each in bfloat16). On the disk 24 Psi bytes, or 12 with `in_place`.

    What is in which tile follows from the step. So `init`, and `shard` and `restore` without the step's
    other arguments, leave optimizer state in the host's memory until the first step, unless there is a plan:
    call `train_step.plan(state, batch)` first, with shapes, for a state that the host has no room for.

    Failures: files have two slots, and a step writes the one that it does not read. A step that fails before
    its commit (a full or broken disk, no memory, Ctrl-C) leaves the state as it was, on the devices, too; a
    process that is killed at any time leaves files of the old or of the new step. Damaged tiles are found by
    their checksums. With `in_place`, and with `Memory(params=jzero.PinnedHost())`, whose parameters are
    updated in their place, a step that fails while it writes loses the state, by name.

    Parameters are stored in the same files with `Memory(params=jzero.NVMe(path, device_bytes=...,
    host_bytes=...), optimizer=jzero.NVMe(path))`, at stage 3 (ZeRO-Infinity). The step runs layer by layer,
    as with `PinnedHost`, and each device's shard of a layer is read ahead of its use::

        file -> pinned memory, in threads            # as far ahead as host_bytes have room
        pinned memory -> device                      # while the layer before computes
        compute, gradients -> pinned memory
        for tile in tiles: read, update, write       # parameters in it, beside masters and moments

    They count in two slots and one commit with the rest: whatever fails before it leaves the whole state as
    it was, and a kill leaves one step or the other, parameters included. Nothing is resident: between steps
    neither devices nor host have any of them. Traffic with disks: 2 Psi bytes read for each pass, and with
    masters 14 Psi each way for the update. Parameters that a step does not change (the base under LoRA) are
    written once, when the state is placed, and only read. The two policies agree in all but `host_bytes` and
    `device_bytes`. `jzero.shard_eval_step(..., memory=jzero.NVMe(path))` reads parameters so.

    Gradients wait for the update in pinned memory, 2 Psi bytes in bfloat16, unless `gradients=True`. Then
    they are written as layers end, where the tiles that they belong to will be written, and read with these
    tiles. So the host's memory does not grow with the model: beside both `host_bytes` it has the gradients
    of five layers at a time. It costs 2 Psi bytes more each way (4 in float32), of which the backward pass
    hides those that it writes, as far as the disk keeps up, and no space; with `in_place`, as much space.
    A clip by the norm of all gradients stays what it is: the devices compute what an update needs of all
    gradients. Where gradients have room in memory, a step moves less with them there.

    The files are scratch for one run, and no checkpoint: `jzero.Checkpointer` saves and restores such a state
    like any other, 256 MiB or a leaf at a time, while steps go on; the step after the next one waits until
    what is saved has been read. Files stay when the process ends. Each state that is alive has files of its
    own.

    >>> import tempfile, jax, jax.numpy as jnp, optax, jzero
    >>> tx = jzero.master_weights(optax.adamw(1e-2))
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state
    >>> folder = tempfile.TemporaryDirectory()  # of a disk: "/nvme/run"
    >>> train_step = jzero.shard_train_step(step_fn, memory=jzero.NVMe(folder.name, host_bytes=2**20))
    >>> w, batch = jnp.ones((64, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    >>> w, opt_state = train_step((w, tx.init(w)), batch)
    >>> opt_state.masters
    LeafArray(shape=(64, 64), dtype=float32, in files)
    >>> [(x.what, x.elements) for x in train_step.describe((w, opt_state), batch).transfers
    ...  if x.direction == "to disk"]  # of one of 8 devices: a master and two moments
    [('optimizer state', 512), ('optimizer state', 512), ('optimizer state', 512)]
    >>> folder.cleanup()

    Attributes:
      path: a folder on the disk, absolute or of the working directory; made if it is not there. Several
        processes may name the same one.
      host_bytes: the most bytes of the host's memory for tiles in each process, 1 GiB by default, at least
        64 KiB. A sixteenth of it, up to 32 MiB, is a tile. In `Memory(params=)`: of parameters between the
        disk and the devices, those of all of the process's devices, pinned, and what they are read through.
      in_place: whether the new state is written over the old one: half of the disk's space, and a step that
        fails while it writes loses the state.
      resume: whether a state that is placed takes its optimizer state from the files that an earlier run has
        left, whatever the state itself has of it. They must be of the same leaves, mesh, processes and
        `host_bytes` (by which tiles are cut), and of the same step as the rest of the state, which comes from
        a checkpoint: `jzero.Checkpointer` stores an id of the step that the files have, and `jzero.restore`
        returns a state that knows it. A state without one (from an initialiser, NumPy, an older checkpoint)
        and files of another step or state are refused, and never overwritten; where there are no files, new
        ones are made. Both slots count, so the step before the last can be resumed, too. In one process,
        too, a state that is placed goes on with the files of one that is gone. False (default): files of an
        earlier run are refused.
      threads: how many threads update; by default as many as `HostCPU` has.
      device_bytes: in `Memory(params=)`, the most bytes of parameters on each device at any time, gathered
        ones included; 1 GiB by default. In `Memory(optimizer=)` there is none.
      gradients: whether gradients wait for the update in the files, too, and not in the host's memory: see
        above. With `Memory(params=)`, and the same in both.

    Reference:
      Rajbhandari, Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale
      Deep Learning", 2021, sections 5.1.1 and 5.2.2.
    """

    path: str | os.PathLike[str]
    host_bytes: int = 2**30
    in_place: bool = False
    resume: bool = False
    threads: int | None = None
    device_bytes: int | None = None
    gradients: bool = False

    def __post_init__(self) -> None:
        is_path = isinstance(self.path, str | os.PathLike) and bool(os.fspath(self.path))
        if not is_path or "\0" in str(os.fspath(self.path)):
            raise self._refused(
                f"path={self.path!r}", "It is a folder on a disk of the devices' host.",
                'Use jzero.NVMe("/nvme/run").')  # fmt: skip
        object.__setattr__(self, "path", str(Path(os.fspath(self.path)).absolute()))
        self._make_int(
            "host_bytes", _LEAST_BYTES,
            "It is how many bytes of the host's memory hold tiles of state, an int from 65536.",
            "Use host_bytes=2**30, or drop it.")  # fmt: skip
        self._check_bools("in_place", "resume", "gradients")
        self._make_int("threads", 1, *_THREADS)
        self._make_int(
            "device_bytes", 1,
            "It is how many bytes of parameters may be on a device at a time, an int from 1.",
            "Use device_bytes=2**30, or drop it.")  # fmt: skip


def _float(x: Any) -> float | None:
    """A float, also from NumPy's; None if it is none."""
    if isinstance(x, bool | str):
        return None
    try:
        return float(x)
    except (TypeError, ValueError):
        return None


NO_OFFLOAD = NoOffload()


_NAMED: dict[str, Callable[[], Policy]] = {
    "device": NoOffload,
    "pinned_host": PinnedHost,
    "host": HostCPU,
}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Memory(GivenFields):
    """Which memory holds what; a policy alone, `memory=jzero.HostCPU()`, is that of optimizer state.

    A string stands for a policy as it is by default: 'device' for `jzero.NoOffload()`, 'pinned_host' (as in
    JAX's memory kinds) for `jzero.PinnedHost()`, 'host' for `jzero.HostCPU()`.

    With anything off the devices a step is several programs: it cannot be called under an outer `jax.jit`
    or lowered, and one that fails while it runs (out of memory, not a refused batch) may have consumed part
    of its state. Scalars, leaves below `Axes.min_shard_bytes`, and what is read with the batch stay on the
    devices.

    >>> import jzero
    >>> jzero.Memory(params=jzero.PinnedHost(device_bytes=2**31), optimizer="host").optimizer
    HostCPU()

    Attributes:
      params: where parameters are stored, at stage 3. `PinnedHost(device_bytes=...)`: in pinned memory, each
        device's shard with its own host (ZeRO-Infinity). The step runs layer by layer: a layer's shards are
        fetched while the layer before computes, its gradients leave when they are reduced, and never are
        more than `device_bytes` of parameters, gathered ones included, on a device. Loops over layers run
        iteration by iteration, unrolled models in parts that fit. With `optimizer=HostCPU()` the host
        updates parameters in place, layer by layer, while earlier layers compute their backward pass, and
        nothing else moves; else parameters and gradients return to the devices for the update, in shards:
        within `device_bytes`, or with their optimizer state within that of `optimizer=PinnedHost(...)`.
        Traffic to each device: its shards once in each pass. `NVMe(path, device_bytes=..., host_bytes=...)`,
        with `optimizer=NVMe(path)`: in the files of the optimizer state, from where they are read ahead of
        their layers, and where they are updated. Microbatches, and other loops around layers, keep what they
        read of parameters if `device_bytes` has room for it; else each iteration fetches it again, but see
        `Microbatches.order`. Refused with `Comm(prefetch_bytes=)`, another `Comm(gather=)`, different
        `Axes(params=)` and `Axes(optimizer=)`, and `HostCPU`'s `ratio` and `delayed_update`.
      optimizer: where optimizer state is stored. `PinnedHost(device_bytes=...)`: in pinned memory; each step
        copies it to the devices and back in buckets, at most `device_bytes` of it at a time. `HostCPU(...)`:
        in the host's memory, updated there by its processors; only gradients and parameters move.
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

    params: Policy | str = NO_OFFLOAD
    optimizer: Policy | str = NO_OFFLOAD
    activations: Policy | str = NO_OFFLOAD

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            policy = _policy("Memory", field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, policy)


def memory_of(who: str, given: Any, short: str = "optimizer") -> Memory:
    """`memory=` as a `Memory`; a policy alone is that of the field `short`."""
    if isinstance(given, Memory | None):
        return given or Memory()
    return Memory(**{short: _policy(who, "memory", given)})


def _policy(who: str, name: str, given: Any) -> Policy:
    if isinstance(given, Policy):
        return given
    if isinstance(given, str) and given in _NAMED:
        return _NAMED[given]()
    also = ", or a jzero.Memory" * (name == "memory")
    raise OptionError(message(
        who, f"{name}={given!r}", f"It is a policy, or one of {', '.join(map(repr, _NAMED))}{also}.",
        f"Write {name}=jzero.PinnedHost(), or drop it."))  # fmt: skip
