# SPDX-License-Identifier: Apache-2.0
"""`shard_train_step`, the one call a user makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

from jax.sharding import PartitionSpec

from jzero._errors import OptionError, message
from jzero._own_options import refuses_unknown_options
from jzero._policy import NO_OFFLOAD, Policy
from jzero._step import ShardedTrainStep
from jzero._step_types import Result, StepArgs, TrainStepOptions
from jzero.offload._backends import backend_of
from jzero.sharding.plan._options import MAX_GATHER_BYTES, Options, axis_tuple
from jzero.tracing import _call

WHO = _call.WHO


# Two forms, for those who check types: a step, and a decorator of one.
@overload
def shard_train_step(
    step_fn: Callable[StepArgs, Result], **options: Unpack[TrainStepOptions]
) -> ShardedTrainStep[StepArgs, Result]: ...
@overload
def shard_train_step(
    step_fn: None = None, **options: Unpack[TrainStepOptions]
) -> Callable[[Callable[StepArgs, Result]], ShardedTrainStep[StepArgs, Result]]: ...
@refuses_unknown_options
def shard_train_step(
    step_fn: Callable[..., Any] | None = None,
    *,
    stage: int = 3,
    accumulate: int = 1,
    reduce: str | None = None,
    accumulate_dtype: Any = None,
    reduce_dtype: Any = None,
    gather_dtype: Any = None,
    gather: str | None = None,
    prefetch_bytes: int | None = None,
    min_shard_bytes: int = 1024,
    full: str | None = None,
    param_axes: str | Sequence[str] | None = None,
    optimizer_axes: str | Sequence[str] | None = None,
    auto_specs: Mapping[str, PartitionSpec] | None = None,
    offload: Policy = NO_OFFLOAD,
    offload_params: Policy = NO_OFFLOAD,
    offload_activations: Policy = NO_OFFLOAD,
    max_gather_bytes: int = MAX_GATHER_BYTES,
    tile_bytes: int | None = None,
    layer_major: bool = False,
    donate: bool = True,
    mesh: Any = None,
    axis_names: str | Sequence[str] | None = None,
    axis_name: str | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    in_specs: Mapping[str | int, Any] | None = None,
    state_argnums: int | Sequence[int] | None = None,
    state_argnames: str | Sequence[str] = (),
) -> Any:
    """Removes the redundancy of data parallelism from a train step, like ZeRO.

    The result is called like `step_fn` and trains what `jax.jit(step_fn)` trains on one device with the
    whole batch. In between, each device holds its rows of the batch and its part of the state::

        what is summed over the batch is summed over the devices, there   # gradients, losses, statistics
        gradients are reduce-scattered                                    # stage >= 1
        optimizer state and parameters are updated in shards              # stage >= 1
        parameters rest in shards, gathered once for each pass            # stage 3

    `step_fn(state, *args) -> (state, metrics)`, or the state alone. The state is any pytree of arrays:
    Flax `TrainState`, `nnx.State`, a tuple, a dataclass; or several arguments, wherever they stand. Whatever
    the step does with its rows (losses that couple them, sorts, control flow on a loss, noise) means what
    it means on one device; outputs with rows come back whole, in their order. An operation along the batch
    that has no rule gathers the rows: `describe` lists it.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = optax.adam(1e-2)
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> params = jnp.ones((8, 4))
    >>> state, metrics = train_step((params, tx.init(params)), jnp.ones((8, 8)))
    >>> metrics["loss"].item()
    64.0

    State in several arguments stays there:

    >>> def step_of_three(params, opt_state, batch):
    ...     (params, opt_state), metrics = step_fn((params, opt_state), batch)
    ...     return params, opt_state, metrics
    >>> train_step = jzero.shard_train_step(step_of_three)
    >>> params, opt_state, metrics = train_step(*state, jnp.ones((8, 8)))

    NNX objects are state wherever they stand, and are mutated, as by `nnx.jit`. What of an Equinox module is
    no array is compiled in, as by `eqx.filter_jit`. See docs/guide/nnx-and-equinox.md.

    >>> from flax import nnx
    >>> @jzero.shard_train_step(stage=3)
    ... def train_step(model, optimizer, batch):
    ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> train_step(model, optimizer, jnp.ones((8, 8))).shape, optimizer.step.get_value().item()
    ((), 1)

    Sharp edges: the state is donated, as with `jax.jit(step_fn, donate_argnums=0)`, but for `donate=False`. A
    step that has collectives of its own over the data axes (`axis_name`) is taken as one device's, as
    `jax.pmap` would: it is obeyed as written, on each device's rows, and what it leaves different between
    devices, in the state or as a metric without rows, is refused. With several processes, each calls the step
    with its own rows as part of one array (`jax.make_array_from_process_local_data`); a NumPy array stands
    for the whole batch on all of them.

    Args:
      step_fn: the train step; None to use `shard_train_step(stage=...)` as a decorator.
      stage: 0 nothing is sharded (2 Psi elements of traffic per step for Psi parameters), 1 optimizer
        state, 2 also reduced gradients (both 2 Psi), 3 also parameters (3 Psi).
      accumulate: microbatches k that each device works through in a step, one after the other: the
        activations of one are alive at a time. The step itself does not change, and trains what it trains
        with the whole batch. What needs all rows before it goes on (a count, the embeddings of a contrastive
        loss, a median) runs in several loops, of which the later ones compute again what they need, or read
        what was kept (`describe` lists both). Refused are rows that are gathered inside a loop or branch of
        the step, and steps whose products would run more than four times as often (BatchNorm in every layer).
        Traffic: see `reduce` and `gather`. Memory: one more gradient, in `accumulate_dtype`, in the
        layout that `reduce` gives it.
      reduce: 'once' sums gradients up on each device and reduces them after the last microbatch: Psi
        elements per step, and a full gradient on each device. 'each' reduces those of each microbatch: k
        Psi, and a gradient in shards. Stages 0 and 1 are 'once', stage 2 is 'each', stage 3 can be either
        and is 'each' by default. It holds for a step's own loop over microbatches too.
      accumulate_dtype: in which the gradients of microbatches are summed up. By default float32 (float64
        for float64 ones): 4 bytes per element of the gradient that `reduce` keeps.
      reduce_dtype: in which gradients travel and are summed over the devices: bfloat16 halves the bytes
        of float32 gradients, float32 sums bfloat16 ones more exactly. By default as the step has them.
        From stage 1 on also codes, `jnp.int8`, `jnp.int4` or a `jzero.Blocks`, or a dict with those of each
        data axis, `{'local': jnp.int8, 'node': jnp.int4}`: gradients then go from device to device as codes,
        one axis after the other, the last one of the mesh first, and are summed in float32. Exact stay those
        of the leaves that `gather_dtype` leaves exact.
      gather_dtype: codes in which parameters are gathered, at stage 3 for each pass: `jnp.int8`, `jnp.int4`
        or a `jzero.Blocks`. Neighbours have a scale in common, and each comes within half a step of it: other
        numbers than those of `jax.jit`, near to them, and the same on all devices. Traffic of gathers: about
        a half of bfloat16's for int8, a quarter for int4. Exact stay small leaves and what no matrix product
        reads (norms, biases, tables that are only looked up); `describe` lists them. Where a gathered copy
        rests (stages 1 and 2, and the axes beside `param_axes`) the difference of new parameters to it goes
        so, of those that have masters. By default parameters are gathered as the step reads them.
      gather: at stage 3, how long gathered parameters live. 'per_pass' (default): gathered for the
        forward pass, freed, and again for the backward pass: 2 Psi per microbatch, memory of one layer.
        'keep': the forward pass's copy serves the backward pass: Psi per microbatch, Psi elements alive
        in between. 'once_per_step': one gather serves all microbatches: Psi, alive throughout.
      prefetch_bytes: at stage 3, how many gathered bytes there may be on each device ahead of the matrix
        products that first use them, so that gathers hide behind compute: a loop over layers gathers for
        the next layer while it computes this one. Traffic does not change. Memory: up to these bytes,
        beside what is in use. By default 256 MiB, a layer of 128 Mi bfloat16 parameters. Larger ones are
        gathered beside the product before theirs; with 0 nothing is, and a gather waits for all products
        before its use. Gradients are reduced together up to the smaller of these bytes and 2 MiB for each
        device (4 MiB at least), and of `tile_bytes`; half of that, or a sixteenth of all, outside of loops.
      min_shard_bytes: leaves smaller than this stay full, because a collective costs more time than
        they cost memory; 0 shards whatever can be. Each costs its bytes on every device. Neither are
        leaves sharded that would have to be padded (`jzero.LeafArray`: no dim is divided by the devices)
        to save less than 1 MiB on each device, as long as these are in all at most 1 % of its model
        states, that is of its share of all leaves of the state, in whatever memory; 0 pads these too.
      full: a regular expression, searched in the paths of parameters at stage 3; those that match rest
        full and are never gathered, while their gradients and optimizer state stay in shards (as at
        stage 2). Costs their bytes on every device, saves Psi_leaf of traffic per microbatch.
      param_axes: the data axes over which parameters rest at stage 3, all by default. With
        param_axes='local' they are gathered within a node; new ones are gathered over the other axes
        of `optimizer_axes` once per step (ZeRO-3 inside a node, ZeRO-1 over all of them). Memory:
        parameters are divided by the devices of these axes only.
      optimizer_axes: the data axes over which gradients and optimizer state are sharded, all by default.
        param_axes='local', optimizer_axes='local' is hybrid sharding (HSDP, MiCS): shards within a
        node, gradients all-reduced between nodes, as shards and once per step.
      auto_specs: `{regular expression: PartitionSpec}`, how state leaves rest over mesh axes that are
        not among `axis_names` (tensor parallelism): the first expression found in a leaf's path counts,
        for moments too, as far as they have such dims. ZeRO shards another dim of such a leaf. Inside the
        step, say it with `jax.lax.with_sharding_constraint(x, PartitionSpec(...))`; XLA places those
        collectives, and `describe` does not count them.
      offload: where optimizer state rests. By default, `jzero.NoOffload()`, on the devices.
        `jzero.PinnedHost(device_bytes=...)`: in the pinned memory of the devices' host; each step copies it
        to the devices and back, piece by piece, and never has more than `device_bytes` of it there.
        `jzero.HostCPU(...)`: in the host's memory, updated there by its processors; only gradients and
        parameters cross. `jzero.NVMe(path, host_bytes=...)`: in files, updated there, too, tile by tile, with
        at most `host_bytes` of it in each process's memory. Scalars, leaves below `min_shard_bytes`, and what
        is read with the batch stay. A step is then several programs: it cannot be called under an outer
        `jax.jit` or lowered. One that fails while it runs (out of memory, not a refused batch) may have
        consumed part of its state.
      offload_params: where parameters rest at stage 3. By default, `jzero.NoOffload()`, on the devices.
        `jzero.PinnedHost(device_bytes=...)`: in pinned memory of the devices' host, each device's shard with
        its own host (ZeRO-Infinity). The step runs layer by layer: a layer's shards are fetched while
        the layer before computes, its gradients leave when they are reduced, and never are more than
        `device_bytes` of parameters, gathered ones included, on a device. Loops over layers run turn by
        turn, unrolled models in parts that fit. Where two turns have room, each gathers for the next one
        beside its compute. With `offload=jzero.HostCPU()` the host updates parameters in their place, layer
        by layer while earlier layers compute their backward pass (behind it in steps that are clipped by the
        norm of all gradients), and nothing else crosses; else parameters and gradients visit the devices for
        the update, in shards: within `device_bytes`, or with their optimizer state within that of
        `offload=jzero.PinnedHost(device_bytes=...)`. Traffic to each device: its shards once in each pass.
        `jzero.NVMe(path, device_bytes=..., host_bytes=...)`, with `offload=jzero.NVMe(path)`: in the files
        of the optimizer state, from where they are read ahead of their layers, and where they are updated.
        Microbatches (`accumulate`), and other loops around layers, hold what they read of parameters if
        `device_bytes` has room for it; else each turn fetches it again, but see `layer_major`. Refused with
        `prefetch_bytes`, another `gather`, different `param_axes` and `optimizer_axes`, and `HostCPU`'s
        `ratio` and `delayed_update`.
      offload_activations: where activations wait for the backward pass. By default, `jzero.NoOffload()`, on
        the devices. `jzero.PinnedHost()`: in pinned memory of the devices' host. What a layer loop of the
        forward pass keeps for the backward pass leaves turn by turn, and comes back one turn before it is
        needed; so do values that unrolled layers keep. Below 1 MiB (of a turn's slice, or a value, on one
        device) they stay. It costs their bytes of traffic in each direction, beside the compute, and of
        the host's memory; with `jax.checkpoint` around the layers these are the layers' inputs.
        `describe` lists them. With `offload_params` they move between the programs of layers, beside
        `device_bytes`: those of the layer that runs, and of two more, are on a device. On GPUs it needs JAX
        0.11.1, unless with `offload_params` and without `accumulate`. A step's own checkpoint policies
        (`save_and_offload_only_these_names`) work with and without it.
      max_gather_bytes: the most bytes of a value with the batch's rows that one operation may gather on
        every device. An operation that needs the rows of all devices (a sort of the batch, a callback
        without `jzero.per_example`) is exact and not free; `describe` lists each, and one above this bound
        is refused.
      tile_bytes: a matrix that has more bytes as it is gathered (at stage 3), or its gradient (from stage 1
        on), is never whole on a device: each product gathers and uses it, or makes and reduces it, in
        ranges of one of its dims of up to so many bytes (memory-centric tiling), the next one beside the
        use of this one. Memory: a few such tiles, in place of the largest matrices and their gradients.
        Traffic: as without, but that a matrix that several products of a pass read (recomputation is one
        more) is gathered for each. First tiles of several matrices may be gathered together, up to
        `prefetch_bytes`. None (default): no tiles. What is not read by products, a table's
        look-up or a convolution's kernel, is whole as ever: `describe` names it.
      layer_major: with `offload_params` and `accumulate=k`, all k microbatches pass a layer before the next
        layer comes (layered gradient accumulation). False (default): one microbatch after the other passes
        all layers. Traffic: a layer is fetched and gathered once for each pass of all k, so 2 passes of
        parameters in a step, and its gradient is reduced once.
        Memory: one layer's parameters and its whole gradient, within and beside `device_bytes`; and on the
        devices, what layers hand on for all k microbatches (with `jax.checkpoint` around each layer, its
        inputs for the device's whole part of the batch), which `describe` counts. Refused without the two,
        with `reduce='each'`, and where microbatches print or call back.
      donate: False keeps the state that a step is given, as `jax.jit` does without `donate_argnums`: for an
        average of old states, or to go back. Memory: all of the state once more while a step runs, wherever
        it rests. Refused with `HostCPU` and `NVMe`, which write over it.
      mesh: a `jax.sharding.Mesh`. By default that of `jax.set_mesh`, else one axis over all devices.
      axis_names: the mesh axes to shard over, the data axes; all of the mesh's by default. Others
        stay XLA's. Explicit axes are taken as Auto.
      axis_name: the name by which the step itself calls the data axis, if it was written for
        `jax.pmap(..., axis_name=...)`. To such a step each microbatch is a device: with `accumulate=k` it
        trains what it would on k times as many devices.
      static_argnums: positions of arguments that are compiled in, as for `jax.jit`; those that a `step_fn`
        of `jax.jit` has are taken over.
      static_argnames: their names.
      in_specs: `{argument: PartitionSpec}` (by name or position; tree prefixes allowed) for arguments
        whose rows are not along dim 0 (`P(None, 'data')`), whose tokens are split as well
        (`P('data', 'context')`, with all state on the devices), or that shall be whole on every device
        (`P()`). It decides only costs.
      state_argnums: positions of the arguments that are the state, by default the first that is not static if
        it comes back first or alone, else those that come back, by structure, shapes and dtypes, of those
        alike in their order (optimizer state is state in any case; what may be a batch is refused). The
        step is called, and returns, as it is written. All of them are donated. What takes or gives a state
        (`init`, `shard`, `unshard`, `flush`, `state_shardings`, checkpoints) has the tuple of these
        arguments, in the order of the parameters; a leaf's path begins with the argument's name,
        `params['w']`. In a method, `self` is 0.
      state_argnames: their names.

    Returns:
      A `ShardedTrainStep`.

    Raises:
      OptionError: an option that cannot be obeyed.
      StepError: when first called, a step that jzero cannot make right.
      MeshError: a mesh or axis that does not fit (some of it when first called).

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020, sections 5 (stages) and 7 (traffic). Zhang et al.: "MiCS: Near-linear Scaling for
      Training Gigantic Model on Public Cloud", 2022, section 3 (param_axes, optimizer_axes). Rajbhandari,
      Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
      Learning", 2021, section 5.1.3 (tile_bytes). Lamy-Poirier: "Layered gradient accumulation and modular
      pipeline parallelism: fast and efficient training of large language models", 2021 (layer_major).
    """
    chosen = Options(
        stage, accumulate, reduce, accumulate_dtype, reduce_dtype, gather, prefetch_bytes,
        min_shard_bytes, full, axis_tuple(param_axes), axis_tuple(optimizer_axes),
        _items(auto_specs), max_gather_bytes, tile_bytes,
        offload=backend_of(WHO, offload, offload_params), offload_activations=offload_activations,
        layer_major=layer_major, donate=donate, gather_dtype=gather_dtype,
    )  # fmt: skip
    options = dict(
        options=chosen, mesh=mesh, axis_names=axis_names, axis_name=axis_name,
        static_argnums=static_argnums, static_argnames=static_argnames, in_specs=in_specs,
        state_argnums=state_argnums, state_argnames=state_argnames,
    )  # fmt: skip
    if step_fn is None:
        return lambda fn: ShardedTrainStep(fn, **options)
    return ShardedTrainStep(step_fn, **options)


def _items(auto_specs: Mapping[str, PartitionSpec] | None) -> tuple[tuple[str, Any], ...]:
    if not isinstance(auto_specs, Mapping | None):
        raise OptionError(message(
            WHO, f"auto_specs={auto_specs!r}", "It maps regular expressions to PartitionSpecs.",
            "Write {'regular expression': jax.P(None, 'model')}."))  # fmt: skip
    return tuple((auto_specs or {}).items())
