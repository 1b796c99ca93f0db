# SPDX-License-Identifier: Apache-2.0
"""The step that `estimate` describes: a loop over layers of one matrix each, planned like any other step."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractDevice, AbstractMesh

from jzero._policy import HostCPU, Memory, NVMe, PinnedHost, Policy
from jzero.offload._backends import backend_of
from jzero.reports._describe import Report, report_of
from jzero.reports._sizes import RoleBytes
from jzero.segments._programs import Programs
from jzero.sharding.plan._options import Options
from jzero.tracing._precision import master_weights
from jzero.tracing._signature import Signature

# [Note: sizes of the abstract step] Its shapes are not the model's: numbers alone do not determine these, the
# devices might not divide them, and no dtype has 0.3 bytes. Its leaves are so large that none stays
# replicated for being small, the devices divide all of them, and the results are scaled to the model. Three
# decisions depend on sizes, and are therefore forced: matrices are tiled if there are tiles, parameters fit
# `device_bytes` or not (`whole`), and all activations are worth a copy.
_LAYERS = 11
# Per device: so many that shards take more than the gathered parameters of a few layers.
_LAYERS_OF_EACH = 4
# Of a matrix: the size of a quantized block, which divides a shard.
_LEAST_DIM = 256
_ROWS = 2048  # of a microbatch on a device; a loop saves at least 1 MiB of them per iteration
_TILES = 4  # of a matrix
# Gathered layers in the budget: one is used, a second is gathered beside it; all of them take 4 or more.
_WINDOW = 3
_UNBOUNDED = 2**50  # bytes


class Types(NamedTuple):
    """The dtypes that bytes per parameter stand for; they decide what a program does."""

    params: str  # the dtype in which parameters are stored
    compute: str  # the dtype in which passes use them
    # of the optimizer: 'masters' (then its update reads no parameter), 'moments' or 'none'
    state: str

    @classmethod
    def of(cls, sizes: RoleBytes) -> Types:
        state = "masters" if sizes.masters else "moments" if sizes.optimizer_state else "none"
        narrow = sizes.compute < sizes.parameters
        params = "float32" if narrow or not sizes.masters and sizes.parameters > 2 else "bfloat16"
        return cls(params, "bfloat16" if narrow else params, state)


class AbstractStep(NamedTuple):
    report: Report
    types: Types
    layers: int
    width: int  # of a layer's matrix, which is square
    tiles: int  # per matrix

    @property
    def num_params(self) -> int:
        return self.layers * self.width**2

    @property
    def saved_elements(self) -> int:
        """Elements that the loop saves for the backward loop, on each device, of all microbatches."""
        return self.layers * self.width * _ROWS * self.report.plan.accumulate


# It takes 0.1 s, and a table of stages asks for each of them more than once.
@functools.lru_cache(maxsize=64)
def abstract_step(
    options: Options, axes: tuple[tuple[str, int], ...], types: Types, recompute: bool, whole: bool
) -> AbstractStep:
    """Plans and describes the step. Options in bytes are replaced, since its sizes are not the model's.

    `whole`: whether all parameters stored on the hosts fit on the devices together, as shards.
    """
    num = math.prod(size for _, size in axes)
    quantized = options.comm.gather_dtype is not None or options.reduces_codes
    width = num * (_LEAST_DIM if quantized else -(-_LEAST_DIM // num))
    layers = _LAYERS_OF_EACH * num + 1 if options.offload.streams else _LAYERS
    tx = {
        "masters": master_weights(optax.sgd(0.1)),
        "moments": optax.sgd(0.1, 0.9),
        "none": optax.sgd(0.1),
    }
    update = tx[types.state]

    def step(state: Any, rows: Any) -> Any:
        params, opt_state = state

        def layer(h: Any, w: Any) -> Any:
            return jnp.tanh(h @ w.astype(types.compute)), None

        def loss(params: Any) -> Any:
            h, _ = jax.lax.scan(jax.checkpoint(layer) if recompute else layer, rows, params)
            return jnp.mean(h.astype(jnp.float32))

        updates, opt_state = update.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    weights = jax.ShapeDtypeStruct((layers, width, width), jnp.dtype(types.params))
    state = weights, jax.eval_shape(update.init, weights)
    num_rows = _ROWS * num * options.microbatches.num
    rows = jax.ShapeDtypeStruct((num_rows, width), jnp.dtype(types.compute))
    tiles = 1 if options.comm.tile_bytes is None else _TILES
    window = _UNBOUNDED if whole else _WINDOW * width**2 * weights.dtype.itemsize
    tile_bytes = width**2 * rows.dtype.itemsize // _TILES
    names, sizes = zip(*axes, strict=True)
    mesh = AbstractMesh(sizes, names, abstract_device=AbstractDevice("", None, ""))
    resized = _resized(options, window, tile_bytes)
    programs = Programs(step, Signature.of(step, (), (), None), resized, mesh)
    # The user's current mesh and dtype promotion must not apply: the step adds float32 to bfloat16.
    nothing = jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    with nothing, jax.numpy_dtype_promotion("standard"):
        call = programs.bind((state, rows), {})
        report = report_of(programs.of(call), call)
    return AbstractStep(report, types, layers, width, tiles)


def _resized(options: Options, window: int, tile_bytes: int) -> Options:
    """The options with the bytes of the abstract step ([Note: sizes of the abstract step])."""
    memory, comm = options.offload.memory, options.comm
    if comm.tile_bytes is not None:
        comm = dataclasses.replace(comm, tile_bytes=tile_bytes)
    params: Any = memory.params
    if isinstance(params, NVMe):
        params = dataclasses.replace(params, host_bytes=_UNBOUNDED, device_bytes=window)
    elif isinstance(params, PinnedHost):
        params = dataclasses.replace(params, device_bytes=window)
    resized = Memory(
        params=params, optimizer=_unbounded(memory.optimizer), activations=memory.activations
    )
    return dataclasses.replace(options, comm=comm, offload=backend_of(options.who, resized))


def _unbounded(policy: Any) -> Policy:
    """A policy of optimizer state that handles all of it at once."""
    match policy:
        case HostCPU():  # A real leaf is not cut; `ScaledStep.share` applies the ratio.
            return dataclasses.replace(policy, ratio=1)
        case NVMe():
            return dataclasses.replace(policy, host_bytes=_UNBOUNDED)
        case PinnedHost():
            return dataclasses.replace(policy, device_bytes=_UNBOUNDED)
    return policy
