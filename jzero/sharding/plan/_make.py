# SPDX-License-Identifier: Apache-2.0
"""Makes the plan of a step: everything is decided here, once."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jzero._errors import StepError, message
from jzero._memory_kinds import DEVICE
from jzero.sharding.analysis._feeds import feed_batch
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._linked_dims import Links
from jzero.sharding.analysis._residuals import residuals
from jzero.sharding.analysis._tables import Tables, looked_up
from jzero.sharding.analysis._update_subgraphs import Names
from jzero.sharding.plan import (
    _auto_specs,
    _host_memory,
    _leaves,
    _quantized_leaves,
    _stored_layout,
    _trace,
)
from jzero.sharding.plan._config import StepConfig
from jzero.sharding.plan._distributed_updates import DistributedStep, distribute_updates
from jzero.sharding.plan._interface import interface_of
from jzero.sharding.plan._leaves import LeafPlan, StoredLeaf
from jzero.sharding.plan._local_step import LocalStep
from jzero.sharding.plan._plan import Analysis, Exchange, Microbatches, StepPlan, variable_names
from jzero.sharding.plan._stages import PARAMETER, StateLeaf
from jzero.tracing import _call, _rewrite


def _check_sizes(leaves: Sequence[StateLeaf], config: StepConfig) -> None:
    """XLA:CPU of JAX 0.11.2 ends the process on an array without elements in any `jax.shard_map`."""
    empty = [f"{x.path} {x.dtype}{list(x.shape)} has no elements" for x in leaves if not x.nbytes]
    old = jax.__version_info__[:2] == (0, 11) and config.mesh.size > 1
    if empty and old and _host_memory.platform_of(config.mesh) == "cpu":
        raise StepError(message(
            _call.WHO, empty, f"XLA crashes on them on several CPU devices (JAX {jax.__version__}).",
            "Use another release of JAX, or leave them out of the state."))  # fmt: skip


def state_leaves(state: Any, config: StepConfig) -> list[StateLeaf]:
    paths = _call.leaf_paths(state, "state")
    leaves = jax.tree.leaves(state)
    options, shapes = config.options, [leaf.shape for leaf in leaves]
    places = _auto_specs.places(
        options.who, options.axes.auto_specs, paths, shapes, config.automatic, config.axis_names
    )
    return [
        StateLeaf(
            path,
            tuple(leaf.shape),
            str(leaf.dtype),
            getattr(leaf.dtype, "itemsize", 4),
            splittable=not _call.is_key(leaf.dtype, leaf.shape),
            floating=_trace.is_float(leaf),
            automatic=automatic,
            cuts=_stored_layout.cuts_of(automatic, config.automatic),
            uncut=uncut,
        )
        for path, leaf, (automatic, uncut) in zip(paths, leaves, places, strict=True)
    ]


def make_plan(
    local: LocalStep, leaves: Sequence[StateLeaf], config: StepConfig,
    stored: Sequence[StoredLeaf | None] = (),
) -> tuple[StepPlan, Analysis]:  # fmt: skip
    """Decides where values are stored, and what runs when. An evaluation reads leaves as `stored` says."""
    stage_axes, options = config.stage_axes, config.options
    frame = local.traced.frame
    is_whole = local.traced.whole_batch is not None
    _check_sizes(leaves, config)
    num = stage_axes.num_devices if is_whole else 1
    tables = looked_up(frame, num)
    links, layouts = _laid_out(frame, tables, leaves, config, stored)
    shared = _distributed(frame, links, layouts, config)
    if shared.distributed:
        frame, whole = shared.frame, local.traced.whole_batch
        if whole is not None:
            jaxpr: Any = frame.jaxpr
            whole = whole._replace(jaxpr=jaxpr)
        traced = dataclasses.replace(local.traced, frame=frame, whole_batch=whole)
        local = dataclasses.replace(local, traced=traced)
        tables = looked_up(frame, num)
        links, layouts = _laid_out(frame, tables, leaves, config, stored)
    backend = options.offload
    reduce_codes = options.reduce_codes(config.axes)
    gather_codes = options.comm.gather_dtype
    if gather_codes is not None or any(reduce_codes.values()):
        layouts = _quantized_leaves.quantize_sent(
            layouts, frame, links, stage_axes, options.comm.gather_dtype
        )
    placed, update = backend.store(layouts, frame, config.mesh, stage_axes)
    # If the step's shapes are one device's and one microbatch's, arguments are so many times as large.
    times = dict.fromkeys(config.axes, 1) if is_whole else config.batch_axes
    interface = interface_of(frame, links, stage_axes, placed, local.specs, times, update)
    waiting = residuals(frame, Frame.varies) if options.moves_activations else {}
    _host_memory.check(options, frame, waiting, config.mesh)
    plan = StepPlan(
        stage=options.stage,
        stage_axes=stage_axes,
        automatic=tuple(config.automatic),
        step_axes=tuple(config.step_axes.items()),
        reductions=_trace.WHOLE if is_whole else _trace.WRITTEN,
        leaves=placed,
        arguments=local.specs,
        outputs=local.outputs,
        microbatches=Microbatches(
            options.microbatches.num, local.row_dims, by_layer=options.by_layer
        ),
        exchange=Exchange(
            options.reduce_once,
            options.reduce_float,
            options.microbatches.dtype,
            options.gather_once,
            options.keep_gathered,
            options.prefetch,
            options.freed_first,
            _loop_bytes(config) if config.evaluates else None,
            options.comm.tile_bytes,
            gather_codes,
            tuple(reduce_codes.items()),
        ),
        update=update,
        buckets=backend.buckets(placed, frame, update, interface),
        device_bytes=backend.fetched_bytes,
        interface=interface,
        names=variable_names(frame),
        evaluates=config.evaluates,
        updates=not config.evaluates and _updates(frame, len(leaves)),
        donates=config.options.donate,
        unread=_unread(frame, len(leaves)) if config.evaluates else frozenset(),
        activations=tuple(waiting.values()) if options.moves_activations else None,
        owned=shared.owned,
    )
    return plan, Analysis(frame, shared.distributed, local.traced.whole_batch)


def _laid_out(
    frame: Frame, tables: Tables, leaves: Sequence[StateLeaf], config: StepConfig,
    stored: Sequence[StoredLeaf | None],
) -> tuple[Links, tuple[LeafPlan, ...]]:  # fmt: skip
    """Linked dims, and the stored layout of each leaf."""
    stage_axes = config.stage_axes
    links = Links(frame, stage_axes.count(stage_axes.shard_axes))
    if config.evaluates:
        options, automatic = config.options, config.automatic
        found = _leaves.plan_as_found(leaves, stored, stage_axes, automatic, frame, links)
        return links, _quantized_leaves.quantize_stored(
            found, stored, frame, options.weight_dtype, options.comm.tile_bytes
        )
    if config.options.needs_masters:
        links.link_returned(frame, len(leaves))
    feeds = feed_batch(frame)[: len(leaves)]
    return links, _leaves.plan_leaves(leaves, feeds, stage_axes, frame, links, tables)


def _distributed(
    frame: Frame, links: Links, layouts: Sequence[LeafPlan], config: StepConfig
) -> DistributedStep:
    """The step with distributed updates, if all state is on the devices, and no other axis shards it."""
    axes = {axis: config.axes[axis] for axis in config.stage_axes.shard_axes}
    options = config.options
    here = options.offload.tier == DEVICE and not options.offload.streams
    if math.prod(axes.values()) == 1 or not here or config.evaluates or config.automatic:
        return DistributedStep(frame, {}, ())
    params = frozenset(i for i, leaf in enumerate(layouts) if leaf.role == PARAMETER)
    names = Names(tuple(leaf.path for leaf in layouts), params)
    return distribute_updates(frame, links, axes, names)


def _updates(frame: Frame, num_leaves: int) -> bool:
    jaxpr = frame.jaxpr
    pairs = zip(jaxpr.invars[:num_leaves], jaxpr.outvars[:num_leaves], strict=True)
    return any(old is not new for old, new in pairs)


def _unread(frame: Frame, num_leaves: int) -> frozenset[int]:
    _, read = _rewrite.behind(frame.jaxpr.eqns, frame.jaxpr.outvars)
    invars = frame.jaxpr.invars[:num_leaves]
    return frozenset(i for i, var in enumerate(invars) if var not in read)


def _loop_bytes(config: StepConfig) -> int:
    """What a loop of an evaluation may keep gathered: by `gather=`, else half of a device's memory.

    With parameters on the hosts, half of what may be on a device: with their shards, all of it.
    """
    if config.options.comm.gather is not None:
        return sys.maxsize if config.options.gather_once else 0
    if config.options.offload.streams:
        return config.options.offload.window.device_bytes // 2
    devices = list(config.mesh.local_devices) if isinstance(config.mesh, Mesh) else []
    there = (
        devices and devices[0].addressable_memories()
    )  # A device that is only compiled for has none.
    stats = devices[0].memory_stats() if there else None
    return int((stats or {}).get("bytes_limit", sys.maxsize)) // 2
