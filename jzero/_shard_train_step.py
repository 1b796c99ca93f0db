# SPDX-License-Identifier: Apache-2.0
"""`shard_train_step`, the one call a user makes."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack, overload

from jzero._errors import OptionError, a_type, message
from jzero._option_groups import Axes, Comm, Microbatches
from jzero._options_of import options_of
from jzero._policy import Memory, Policy
from jzero._sharded_step import ShardedStep
from jzero._step_types import Result, StepArgs, TrainStepOptions
from jzero._unknown_options import refuses_unknown_options
from jzero.segments._programs import Programs
from jzero.tracing import _call
from jzero.tracing._signature import Signature

WHO = _call.WHO


# Overloads for type checkers: a step, and a decorator of one.
@overload
def shard_train_step(
    step_fn: Callable[StepArgs, Result], **options: Unpack[TrainStepOptions]
) -> ShardedStep[StepArgs, Result]: ...
@overload
def shard_train_step(
    step_fn: None = None, **options: Unpack[TrainStepOptions]
) -> Callable[[Callable[StepArgs, Result]], ShardedStep[StepArgs, Result]]: ...
@refuses_unknown_options
def shard_train_step(
    step_fn: Callable[..., Any] | None = None,
    *,
    stage: int = 3,
    microbatches: int | Microbatches = 1,
    memory: Memory | Policy | str | None = None,
    comm: Comm | None = None,
    axes: Axes | str | Sequence[str] | None = None,
    mesh: Any = None,
    in_specs: Mapping[str | int, Any] | None = None,
    state: str | int | Sequence[str | int] | None = None,
    donate: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """Removes the redundancy of data parallelism from a train step, like ZeRO.

    The result is called like `step_fn` and trains what `jax.jit(step_fn)` trains on one device with the
    whole batch. Each device holds its rows of the batch and its shard of the state::

        sums over the batch become sums over the devices                  # gradients, losses, statistics
        gradients are reduce-scattered                                    # stage >= 1
        optimizer state and parameters are updated in shards              # stage >= 1
        parameters are stored sharded, and gathered once for each pass    # stage 3

    `step_fn(state, *args) -> (state, metrics)`, or the state alone. The state is any pytree of arrays:
    Flax `TrainState`, `nnx.State`, a tuple, a dataclass; or several arguments, in any position. Whatever
    the step does with its rows (losses that couple them, sorts, control flow on a loss, noise) means what
    it means on one device; outputs with rows are global arrays, in the order of the rows. An operation along
    the batch that has no rule gathers the rows: `describe` lists it.

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

    NNX objects are state in any position, and are mutated, as by `nnx.jit`. What is not an array in an
    Equinox module is compiled in, as by `eqx.filter_jit`. See docs/guide/frameworks.md.

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

    Sharp edges: the state is donated, as with `jax.jit(step_fn, donate_argnums=0)`, unless `donate=False`. A
    step that has collectives of its own over the data axes (`Axes(axis_name=)`) is one device's program, as
    under `jax.pmap`: it runs as written, on each device's rows, and device-varying results, in the state or
    as a metric without rows, are refused. With several processes, each calls the step with its own rows as
    part of one array (`jax.make_array_from_process_local_data`); a NumPy array is the whole batch on all of
    them.

    Args:
      step_fn: the train step; None to use `shard_train_step(stage=...)` as a decorator.
      stage: 0 nothing is sharded (2 Psi elements of traffic per step for Psi parameters), 1 optimizer
        state, 2 also reduced gradients (both 2 Psi), 3 also parameters (3 Psi).
      microbatches: how many each device works through in a step, one after the other, or a
        `jzero.Microbatches`, which says also when and in which dtype their gradients are summed.
      memory: which memory holds optimizer state: a policy (`jzero.HostCPU()`, `jzero.PinnedHost()`,
        `jzero.NVMe(path)`) or its short name ('host', 'pinned_host'); or a `jzero.Memory`, which also places
        parameters and activations. By default everything is on the devices.
      comm: a `jzero.Comm`: dtypes of gathers and reductions, how long gathered parameters live, prefetching,
        tiling.
      axes: the mesh axes over which the batch and the state are sharded, by default all; or a
        `jzero.Axes`, which says also which of them shard parameters and optimizer state, what stays
        replicated, and how leaves are sharded over further axes.
      mesh: a `jax.sharding.Mesh`. By default that of `jax.set_mesh`, else one axis over all devices.
      in_specs: `{argument: PartitionSpec}` (by name or position; tree prefixes allowed) for arguments
        whose batch dim is not dim 0 (`P(None, 'data')`), whose tokens are sharded as well
        (`P('data', 'context')`), or that are to be replicated (`P()`). It affects only costs.
      state: names or positions of the arguments that are the state, by default the first that is not static
        if it is returned first or alone, else those that are returned, matched by structure, shapes and
        dtypes, and by their order where several match (optimizer state is always state; an argument that may
        be a batch is refused). The step is called, and returns, as it is written. All of them are donated.
        Methods that accept or return a state (`init`, `shard`, `unshard`, `flush`, `state_shardings`,
        checkpoints) use the tuple of these arguments, in the order of the parameters; a leaf's path begins
        with the argument's name, `params['w']`. In a method, `self` is 0.
      donate: False keeps the state passed to a step, as `jax.jit` does without `donate_argnums`: for an
        average of old states, or to go back. Memory: all of the state once more while a step runs, wherever
        it is stored. Refused with `HostCPU` and `NVMe`, which update it in place.
      static_argnums: positions of arguments that are compiled in, as for `jax.jit`; those of a `step_fn`
        under `jax.jit` are kept.
      static_argnames: their names.

    Returns:
      A `ShardedStep`.

    Raises:
      OptionError: an option that cannot be obeyed.
      StepError: when first called, a step that jzero cannot shard exactly.
      MeshError: a mesh or axis that does not fit (some of it when first called).

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020, sections 5 (stages) and 7 (traffic).
    """
    chosen = options_of(WHO, stage, microbatches, memory, comm, axes, donate=donate)

    def make(fn: Callable[..., Any]) -> ShardedStep[..., Any]:
        if not callable(fn):
            raise OptionError(message(
                WHO, f"step_fn is {a_type(fn)}", "It must be a function.",
                "Write shard_train_step(step_fn, stage=3)."))  # fmt: skip
        if isinstance(fn, ShardedStep):
            raise OptionError(message(
                WHO, "step_fn is already a ShardedStep", "A step is sharded once.",
                "Pass its __wrapped__."))  # fmt: skip
        # jit's functions have both; Equinox's are objects, and are traced like any other.
        if isinstance(fn, types.FunctionType) and (
            hasattr(fn, "lower") and not hasattr(fn, "trace")
        ):
            raise OptionError(message(
                WHO, "step_fn was made by jax.pmap", "jzero runs the step on all devices itself.",
                "Pass the function inside, with pmap's axis_name= in axes=jzero.Axes(...)."))  # fmt: skip
        signature = Signature.of(fn, static_argnums, static_argnames, in_specs, state)
        return ShardedStep(fn, Programs(fn, signature, chosen, mesh))

    return make if step_fn is None else make(step_fn)
