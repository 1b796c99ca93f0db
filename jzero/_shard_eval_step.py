# SPDX-License-Identifier: Apache-2.0
"""`shard_eval_step`: evaluation with a sharded state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

from jzero._errors import OptionError, a_type, called_as, message
from jzero._option_groups import Axes, Comm, axes_of, comm_of, refuse_fields
from jzero._policy import Memory, Policy, memory_of
from jzero._sharded_step import ShardedStep
from jzero._step_types import EvalStepOptions, Result, StepArgs
from jzero._unknown_options import refuses_unknown_options
from jzero.offload._evaluation import reading_backend
from jzero.segments._programs import Programs
from jzero.sharding.plan._options import Options
from jzero.tracing._signature import Signature

WHO = "shard_eval_step"


# Overloads for type checkers: an evaluation, and a decorator of one.
@overload
def shard_eval_step(
    eval_step: Callable[StepArgs, Result],
    *,
    like: ShardedStep | None = None,
    **options: Unpack[EvalStepOptions],
) -> ShardedStep[StepArgs, Result]: ...
@overload
def shard_eval_step(
    eval_step: None = None,
    *,
    like: ShardedStep | None = None,
    **options: Unpack[EvalStepOptions],
) -> Callable[[Callable[StepArgs, Result]], ShardedStep[StepArgs, Result]]: ...
@refuses_unknown_options
def shard_eval_step(
    eval_step: Callable[..., Any] | None = None,
    *,
    like: ShardedStep | None = None,
    memory: Memory | Policy | str | None = None,
    comm: Comm | None = None,
    axes: Axes | str | Sequence[str] | None = None,
    mesh: Any = None,
    in_specs: Mapping[str | int, Any] | None = None,
    state: str | int | Sequence[str | int] | None = None,
    weight_dtype: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Evaluates, predicts or generates with a sharded state.

    `eval_step(state, *args) -> anything`. The state is that of a sharded train step, or a part of it, like
    `state.params`; it is read as it is stored, and neither consumed nor returned. The result is what
    `jax.jit(eval_step)` returns on one device with the whole batch: outputs with rows are global arrays, in
    the order of the rows, batch-sharded where the devices divide them. Parameters are gathered layer by
    layer, and freed. Batches may be of any size, the last and smaller one too; each new shape compiles.

    >>> import jax, jax.numpy as jnp, optax, jzero
    >>> tx = optax.adam(1e-2)
    >>> def step_fn(state, batch):
    ...     params, opt_state = state
    ...     loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
    ...     updates, opt_state = tx.update(grads, opt_state, params)
    ...     return (optax.apply_updates(params, updates), opt_state), loss
    >>> train_step = jzero.shard_train_step(step_fn, stage=3)
    >>> params = jnp.ones((64, 8))
    >>> state, loss = train_step((params, tx.init(params)), jnp.ones((16, 64)))
    >>> def predict(params, batch):
    ...     return batch @ params
    >>> eval_step = jzero.shard_eval_step(predict, like=train_step)
    >>> eval_step(state[0], jnp.ones((13, 64))).shape
    (13, 8)

    Generation is the same: `eval_step` contains a `lax.while_loop` or `lax.scan` that decodes with its
    cache, and draws the random bits that one device draws.

    A state of `HostCPU(delayed_update=True)` is read as it is, its parameters without the delayed gradients;
    `train_step.flush(state)` applies these first.

    Leaves that the step does not read, like the optimizer's state, stay where they are; a leaf in host memory
    that it reads is copied to the devices for the call.

    With `memory` parameters are stored in pinned memory of the hosts and fetched to the devices layer by
    layer (ZeRO-Inference), so that a model may be larger than the devices' memory. A decoding loop whose
    weights do not fit within `device_bytes` fetches them layer by layer in each iteration: one position of
    all rows then moves all weights over the link between host and device once, which bounds the rate to
    `rows * bytes per second / bytes of weights` tokens a second; a larger batch raises it. `describe` lists
    these bytes.

    >>> from_host = jzero.shard_eval_step(predict, memory=jzero.PinnedHost(device_bytes=2**20))
    >>> params = from_host.shard(jnp.ones((64, 8)))
    >>> params.sharding.memory_kind, from_host(params, jnp.ones((13, 64))).shape
    ('pinned_host', (13, 8))

    With `weight_dtype` weights are stored and gathered quantized to 8 or 4 bits, a half or a quarter of
    bfloat16's bytes, and dequantized where they are used. `eval_step.shard` quantizes one leaf after the
    other, so that the original weights need not fit on the devices. The result is what `jax.jit` returns for
    the dequantized weights.

    >>> w = jax.random.normal(jax.random.key(0), (512, 512))
    >>> quantized_step = jzero.shard_eval_step(predict, weight_dtype=jnp.int8)
    >>> quantized = quantized_step.shard(w, jnp.ones((13, 512)))
    >>> quantized, quantized_step(quantized, jnp.ones((13, 512))).shape
    (LeafArray(shape=(512, 512), dtype=float32, int8 in blocks of 256), (13, 512))

    Args:
      eval_step: the function; None to use `shard_eval_step(like=...)` as a decorator.
      like: the train step whose state it reads, for its mesh and data axes. Without one, for a model that
        is not trained, `mesh` and `axes` are as for `shard_train_step`, and `ShardedStep.shard` places
        the parameters.
      memory: where parameters are stored: a policy, its short name, or `jzero.Memory(params=...)`. With
        `like` by default where they are stored in the training, of `PinnedHost` and `NVMe` with their
        `device_bytes`: the most bytes of them on each device at a time, gathered ones included. 'device'
        copies those that are read to the devices for the call. With a train step whose parameters are on
        the devices every other policy is refused: it would save nothing. Without `like` by default on the
        devices. With `PinnedHost` an evaluation is a loop of programs, and cannot be traced by an outer
        `jax.jit`; shards of at least 1 KiB are fetched from the host, other leaves are on the devices. With
        `NVMe(path)` they are read from files: those of the training, or, without `like`, files that
        `eval_step.shard` writes once; a state that is not placed is written in every call.
      comm: a `jzero.Comm`, of which `gather`, `prefetch_bytes`, `tile_bytes` and `max_gather_bytes` count.
        By default parameters are gathered where they are used, and a loop that would gather the same ones
        again in each iteration, as decoding does, gathers them before it, if they take at most half of a
        device's memory. `gather='per_pass'`: such a loop gathers them again in each iteration, with the
        memory of one layer. `gather='once_per_step'`: each is gathered once in a call, and kept until the
        call ends. A matrix larger than `tile_bytes` is gathered tile by tile; one that a loop reads in every
        iteration is gathered before the loop, whole, unless `gather` is 'per_pass'.
      axes: the data axes of `mesh`; all by default.
      mesh: a `jax.sharding.Mesh`, where there is no `like`.
      in_specs: layouts of arguments whose batch dim is not dim 0, or that are sharded along several dims; see
        `shard_train_step`.
      state: names or positions of the arguments that are read where they are stored, by default the first,
        or those that `like` has placed or trained as its state, or parts of it.
      weight_dtype: in which weights are stored: `jnp.int8`, `jnp.int4` or a `jzero.Blocks`; by default as
        they are given. It is for leaves of floats with 16,384 elements or more that products or convolutions
        read, as they are, cast, rearranged or sliced; `describe` lists the others, and what was rounded off.
        A state is quantized by `eval_step.shard(state, *args)`, once: a call accepts no other. Any evaluation
        reads quantized leaves, on the mesh on which they were quantized.
      static_argnums: positions of arguments that are compiled in, as for `jax.jit`.
      static_argnames: their names.

    Returns:
      A `ShardedStep`.

    Raises:
      OptionError: an option that cannot be obeyed.
      MeshError: a mesh or axis that does not fit (some of it when first called).

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020, section 5.3: parameters in shards, gathered for the forward pass and freed after it.
      Aminabadi et al.: "DeepSpeed Inference: Enabling Efficient Inference of Transformer Models at
      Unprecedented Scale", 2022, section VI: ZeRO-Inference, with weights in host memory.
    """
    if not (like is None or (isinstance(like, ShardedStep) and like.trains)):
        found = "an evaluation" if isinstance(like, ShardedStep) else a_type(like)
        raise OptionError(message(
            WHO, f"like is {found}", "It is the train step whose state is read.",
            "Pass what shard_train_step returned."))  # fmt: skip
    if like is not None and (mesh is not None or axes is not None):
        raise OptionError(message(
            WHO, "both like and a mesh of its own", "A state is read on the mesh on which it is stored.",
            "Drop mesh and axes, or use like=train_step.on_mesh(mesh)."))  # fmt: skip

    def make(fn: Callable[..., Any]) -> ShardedStep[..., Any]:
        if not callable(fn):
            raise OptionError(message(
                WHO, f"eval_step is {a_type(fn)}", "It must be a function.",
                "Write shard_eval_step(eval_step, like=train_step)."))  # fmt: skip
        with called_as(WHO):
            trained: Any = None if like is None else like.memory.params
            signature = Signature.of(fn, static_argnums, static_argnames, in_specs, state)
            own: dict[str, Any] = dict(
                comm=_comm(comm, like),
                weight_dtype=weight_dtype,
                offload=reading_backend(WHO, _params(memory), trained),
                who=WHO,
            )
            if like is None:
                options = Options(axes=_batch_axes(axes), **own)
                programs = Programs(fn, signature, options, mesh, True)
            else:
                programs = like._programs.to_evaluate(fn, signature, own)
        return ShardedStep(fn, programs)

    return make if eval_step is None else make(eval_step)


def _comm(given: Any, like: ShardedStep | None) -> Comm:
    """The evaluation's `Comm`; `prefetch_bytes` is by default as in the training."""
    comm = comm_of(WHO, given, evaluates=True)
    if like is None or comm.prefetch_bytes is not None:
        return comm
    return dataclasses.replace(comm, prefetch_bytes=like._programs.options.comm.prefetch_bytes)


def _params(memory: Any) -> Any:
    """The policy of parameters, or None."""
    if memory is None:
        return None
    where = memory_of(WHO, memory, short="params")
    refuse_fields(WHO, where, ("optimizer", "activations"), "An evaluation has parameters only.")
    return where.params


def _batch_axes(given: Any) -> Axes:
    axes = axes_of(given)
    names = [x.name for x in dataclasses.fields(axes) if x.name != "batch"]
    refuse_fields(WHO, axes, names, "An evaluation has data axes only.")
    return axes
