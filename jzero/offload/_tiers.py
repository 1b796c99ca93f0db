# SPDX-License-Identifier: Apache-2.0
"""Which leaves are stored where, as `memory=` says, and the cut of the step that follows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.sharding import Mesh

from jzero._components import grouped
from jzero._errors import OptionError, describe_leaf, first_of, message
from jzero._memory_kinds import DEVICE, HOST
from jzero.offload import _bandwidth
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.cut import _subgraphs
from jzero.sharding.cut._subgraphs import OptimizerProgram, Subgraph
from jzero.sharding.plan import _leaves
from jzero.sharding.plan._backend import Backend, Leaves
from jzero.sharding.plan._plan import UpdateBucket
from jzero.sharding.plan._stages import OPTIMIZER, PARAMETER, StageAxes
from jzero.sharding.plan._stored_layout import Shard
from jzero.tracing import _call

WHO = _call.WHO


def offloaded(
    backend: Backend, leaves: Leaves, frame: Frame, stage_axes: StageAxes
) -> tuple[Leaves, OptimizerProgram]:
    """The leaves with optimizer state and parameters in their memory kinds, and the optimizer program."""
    if not backend.offloads:
        return leaves, OptimizerProgram((), ())
    staying = _staying(leaves, frame)
    hosted = _leaves.offload(leaves, HOST, stage_axes.min_bytes, staying)
    moving = [i for i, leaf in enumerate(hosted) if leaf.tier != DEVICE]
    placed = tuple(
        dataclasses.replace(leaf, tier=backend.tier) if i in moving else leaf
        for i, leaf in enumerate(leaves)
    )
    update = _subgraphs.cut_update(frame, moving)
    alone = not moving and backend.window.host_bytes  # Files may have parameters alone.
    if backend.tier != DEVICE and not alone and not update.subgraphs:
        said = f"Memory(optimizer={backend.state!r})" if backend.streams else str(backend)
        raise OptionError(message(
            WHO, f"{said}, and the state has no optimizer state that is worth it",
            "Leaves of min_shard_bytes that only the update reads are offloaded: moments, averages, masters. "
            "A second update in the step, or a loss of its new parameters, reads them with the batch, too.",
            "Drop it, or put these into steps of their own."))  # fmt: skip
    if not backend.streams:
        return placed, update
    placed = with_params(backend, placed, stage_axes)
    params = [i for i, leaf in enumerate(placed) if leaf.is_streamed]
    if not params:
        raise OptionError(message(
            WHO, f"Memory(params={backend.params!r}), and no parameter is worth it",
            f"Those of Axes(min_shard_bytes={stage_axes.min_bytes}) that are sharded are meant, and "
            f"Axes(replicate={stage_axes.full!r}) finds those that are replicated.",
            "Change these, or drop Memory(params=)."))  # fmt: skip
    return placed, _subgraphs.cut_update(frame, moving, params)


def with_params(backend: Backend, leaves: Leaves, stage_axes: StageAxes) -> Leaves:
    whole = [i for i, leaf in enumerate(leaves)
             if stage_axes.num_devices > 1 and not isinstance(leaf.layout, Shard)]  # fmt: skip
    return _leaves.offload(leaves, backend.window.tier, stage_axes.min_bytes, whole, PARAMETER)


def _staying(leaves: Leaves, frame: Frame) -> list[int]:
    """The indices of leaves that are read together with the batch."""
    feeding = _subgraphs.feeds_forward_backward(frame)
    invars = frame.jaxpr.invars[: len(leaves)]
    return [i for i, var in enumerate(invars) if var in feeding]


def check_delayed(leaves: Leaves, frame: Frame, update: OptimizerProgram) -> None:
    """A delayed update happens after the next gradients, and after its own step has returned."""
    staying = _staying(leaves, frame)
    read = [describe_leaf(leaf.path, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)
            if i in staying and leaf.role == OPTIMIZER]  # fmt: skip
    if read:
        raise OptionError(message(
            WHO, [f"{path} is read with the batch" for path in read],
            "A delayed update happens after the next gradients were computed, which must not depend on it.",
            "Drop delayed_update."))  # fmt: skip
    outs = sorted(i - len(leaves) for i in update.outs if i >= len(leaves))
    if outs:
        raise OptionError(message(
            WHO, [f"output {i} beside the state follows from optimizer state" for i in outs],
            "A delayed update happens after the step has returned.",
            "Return it from the state, or drop delayed_update.", things="outputs"))  # fmt: skip


def measured_share(leaves: Leaves, mesh: Mesh, stage_axes: StageAxes, threads: int | None) -> float:
    """The share of optimizer state with which host and devices end together, measured."""
    local = list(mesh.local_devices) if isinstance(mesh, Mesh) else []
    if len(local) != mesh.size:
        others = "some of the mesh's devices are other processes'"
        why = others if local else "the mesh has no devices"
        raise OptionError(message(
            WHO, f"HostCPU(ratio='auto'), and {why}",
            "Host and devices are measured in one process, so that all go by one number.",
            "Use a number, such as describe() reports it for one process."))  # fmt: skip
    moving = sum(leaf.nbytes_per_device for leaf in leaves if leaf.tier != DEVICE)
    # They cross in shards, whole as they may be stored.
    num_shards = stage_axes.count(stage_axes.shard_axes)
    params = sum(leaf.nbytes for leaf in leaves if leaf.role == PARAMETER) // num_shards
    found = _bandwidth.measure(local[0], len(local), threads)
    return _bandwidth.share(found, moving, params)


def shared(leaves: Leaves, update: OptimizerProgram, ratio: float, measured: bool) -> Leaves:
    """Puts leaves back on the devices, so that a share of `ratio` of all bytes stays on the hosts."""
    if ratio == 1:
        return leaves
    together = _connected(update.subgraphs)
    sizes = [leaf.nbytes for leaf in leaves]
    most = ratio * sum(_subgraphs.nbytes_of(group, sizes) for group in together)
    host: set[int] = set()
    held = 0
    for group in sorted(together, key=lambda group: -_subgraphs.nbytes_of(group, sizes)):
        nbytes = _subgraphs.nbytes_of(group, sizes)
        if held + nbytes <= most:
            host |= set(_subgraphs.leaves_of(group))
            held += nbytes
    smallest = min(together, key=lambda group: _subgraphs.nbytes_of(group, sizes))
    if not host and measured:
        host = set(_subgraphs.leaves_of(smallest))
    if not host:
        least = _subgraphs.nbytes_of(smallest, sizes) / (most / ratio)
        paths = [leaves[i].path for i in _subgraphs.leaves_of(smallest)]
        raise OptionError(message(
            WHO, f"HostCPU(ratio={ratio:g}), and {first_of(paths)} are the fewest "
            f"leaves that are updated together: {least:.3f} of all bytes",
            "Leaves whose updates depend on each other are stored in one place.",
            f"Use ratio={min(least + 0.0005, 1):.3f} or more, or drop memory=."))  # fmt: skip
    return tuple(
        leaf if i in host else dataclasses.replace(leaf, tier=DEVICE)
        for i, leaf in enumerate(leaves)
    )


def _connected(subgraphs: Sequence[Subgraph]) -> list[list[Subgraph]]:
    """Groups of subgraphs that pass each other values, or share leaves."""
    given = {var for subgraph in subgraphs for var in subgraph.gives}
    return grouped(
        subgraphs,
        lambda subgraph: {*subgraph.leaves, *subgraph.gives, *given.intersection(subgraph.reads)},
    )


def buckets(leaves: Leaves, update: OptimizerProgram) -> tuple[UpdateBucket, ...]:
    """What the hosts' processors update, and then what the devices do."""
    there = {i for i, leaf in enumerate(leaves) if leaf.tier != DEVICE}
    number = {id(subgraph): i for i, subgraph in enumerate(update.subgraphs)}
    hosted = [
        number[id(subgraph)]
        for group in _connected(update.subgraphs)
        if there & set(_subgraphs.leaves_of(group))
        for subgraph in group
    ]
    rest = [i for i in range(len(update.subgraphs)) if i not in hosted]
    buckets = (
        _bucket(leaves, update, hosted, on_host=True),
        _bucket(leaves, update, rest, on_host=False),
    )
    return tuple(bucket for bucket in buckets if bucket.subgraphs)


def _bucket(
    leaves: Leaves, update: OptimizerProgram, indices: Sequence[int], on_host: bool
) -> UpdateBucket:
    offloaded = _subgraphs.leaves_of([update.subgraphs[i] for i in indices])
    nbytes = sum(leaves[i].nbytes_per_device for i in offloaded)
    paths = tuple(leaves[i].path for i in offloaded)
    return UpdateBucket(tuple(indices), paths, nbytes, on_host=on_host)
