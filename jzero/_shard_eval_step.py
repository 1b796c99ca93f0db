# SPDX-License-Identifier: Apache-2.0
"""`shard_eval_step`: what a state that lives in shards computes, without a step of training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jzero._errors import OptionError, StateError, a_type, called_as, message
from jzero._in_use import Use
from jzero._own_options import refuses_unknown_options
from jzero._policy import Policy
from jzero._sharded_step import ShardedStep
from jzero._step import ShardedTrainStep
from jzero._step_types import EvalStepOptions, Result, StepArgs
from jzero.offload._evaluation import reading_backend
from jzero.offload.memory import _placing
from jzero.offload.memory._leaf_array import LeafArray, rows_of
from jzero.segments import _nan_checks
from jzero.segments._programs import Programs
from jzero.segments._repeat import FlatCall
from jzero.sharding.plan._options import MAX_GATHER_BYTES, Options, axis_tuple
from jzero.tracing._axis_types import takes_explicit_axes
from jzero.tracing._signature import Signature

WHO = "shard_eval_step"
_GATHER = (None, "per_pass", "once_per_step")


# Two forms, for those who check types: an evaluation, and a decorator of one.
@overload
def shard_eval_step(
    eval_step: Callable[StepArgs, Result],
    *,
    like: ShardedTrainStep | None = None,
    **options: Unpack[EvalStepOptions],
) -> ShardedEvalStep[StepArgs, Result]: ...
@overload
def shard_eval_step(
    eval_step: None = None,
    *,
    like: ShardedTrainStep | None = None,
    **options: Unpack[EvalStepOptions],
) -> Callable[[Callable[StepArgs, Result]], ShardedEvalStep[StepArgs, Result]]: ...
@refuses_unknown_options
def shard_eval_step(
    eval_step: Callable[..., Any] | None = None,
    *,
    like: ShardedTrainStep | None = None,
    gather: str | None = None,
    max_gather_bytes: int = MAX_GATHER_BYTES,
    tile_bytes: int | None = None,
    offload_params: Policy | None = None,
    weight_dtype: Any = None,
    mesh: Any = None,
    axis_names: str | Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    in_specs: Mapping[str | int, Any] | None = None,
    state_argnums: int | Sequence[int] | None = None,
    state_argnames: str | Sequence[str] = (),
) -> Any:
    """Evaluates, predicts or generates with a state as it rests in shards.

    `eval_step(state, *args) -> anything`. The state is that of a sharded train step, or a part of it, like
    `state.params`; it is read where it lies, and neither consumed nor returned. What comes back is what
    `jax.jit(eval_step)` returns on one device with the whole batch: outputs with rows are whole arrays, in
    their order, split over the devices where they divide. Parameters are gathered layer by layer, and
    freed. Batches may be of any size, the last and smaller one too; each new shape compiles.

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

    Generation is the same: `eval_step` holds a `lax.while_loop` or `lax.scan` that decodes with its cache,
    and draws the bits that one device draws.

    A state of `HostCPU(delayed_update=True)` is read as it is, its parameters without the gradients that
    wait; `train_step.flush(state)` applies these first.

    Leaves that the step does not read, like the optimizer's state, stay where they are; one in host memory
    that it reads is copied to the devices for the call.

    With `offload_params` parameters rest in pinned memory of the hosts and come to the devices layer by
    layer (ZeRO-Inference), so that a model may be larger than the devices' memory. A decoding loop that
    has no room for all that it reads runs turn by turn, each turn part by part: each position of all rows
    then moves all weights over the link between host and device once, and there are at most `rows * bytes
    per second / bytes of weights` tokens a second, which a larger batch raises. `describe` says how many
    bytes these are.

    >>> from_host = jzero.shard_eval_step(predict, offload_params=jzero.PinnedHost(device_bytes=2**20))
    >>> params = from_host.shard(jnp.ones((64, 8)))
    >>> params.sharding.memory_kind, from_host(params, jnp.ones((13, 64))).shape
    ('pinned_host', (13, 8))

    With `weight_dtype` weights rest in codes of 8 or 4 bits, a half or a quarter of bfloat16's bytes, and so
    they are gathered; they are decoded where they are used. `eval_step.shard` codes them, one leaf after the
    other, so that they need not fit on the devices as they were. What comes back is what `jax.jit` returns
    for the weights that the codes say.

    >>> w = jax.random.normal(jax.random.key(0), (512, 512))
    >>> in_codes = jzero.shard_eval_step(predict, weight_dtype=jnp.int8)
    >>> coded = in_codes.shard(w, jnp.ones((13, 512)))
    >>> coded, in_codes(coded, jnp.ones((13, 512))).shape
    (LeafArray(shape=(512, 512), dtype=float32, int8 in blocks of 256), (13, 512))

    Args:
      eval_step: the function; None to use `shard_eval_step(like=...)` as a decorator.
      like: the train step whose state it reads, for its mesh and data axes. Without one, for a model that
        is not trained, `mesh` and `axis_names` are as for `shard_train_step`, and `ShardedEvalStep.shard`
        places the parameters.
      gather: how long gathered parameters live. By default they are gathered where they are used, and a loop
        that would gather the same ones again in each turn, as decoding does, gathers them before it, if
        they take at most half of a device's memory. 'per_pass': such a loop gathers them again in each turn:
        the memory of one layer. 'once_per_step': each is gathered once in a call, and kept until it is done.
      max_gather_bytes: the most bytes of a value with the batch's rows that one operation may gather on every
        device; see `shard_train_step`.
      tile_bytes: a matrix of more bytes is gathered tile by tile by the products that read it; see
        `shard_train_step`. One that a loop reads in every turn is gathered before the loop, whole, unless
        `gather` is 'per_pass'.
      offload_params: where parameters rest. With `like` by default where they rest in the training, of
        `PinnedHost` and `NVMe` with their `device_bytes`: the most bytes of them on each device at a time,
        gathered ones included. `jzero.NoOffload()` copies those that are read to the devices for the call.
        With a train step whose parameters rest on the devices no other policy is taken: nothing would be
        saved. Without `like` by default on the devices. With `PinnedHost` an evaluation is a loop of
        programs, and no part of an outer `jax.jit`; leaves in shards of at least 1 KiB come from the host,
        others rest on the devices. With `NVMe(path)` they come from files: those of the training, or, without
        `like`, such as `eval_step.shard` writes once; a state that is not placed is written in every call.
      weight_dtype: in which weights rest: `jnp.int8`, `jnp.int4` or a `jzero.Blocks`; by default as they are
        given. It is for leaves of floats with 16,384 elements or more that products or convolutions read, as
        they are, cast, rearranged or sliced; `describe` lists the others, and what was rounded off. A state
        is coded by `eval_step.shard(state, *args)`, once: a call takes no other. Any evaluation reads leaves
        in codes, on the mesh on which they were coded.
      mesh: a `jax.sharding.Mesh`, where there is no `like`.
      axis_names: the data axes of that mesh; all by default.
      static_argnums: positions of arguments that are compiled in, as for `jax.jit`.
      static_argnames: their names.
      in_specs: how arguments lie whose rows are not along dim 0, or split along several; see
        `shard_train_step`.
      state_argnums: positions of the arguments that are read where they rest, by default the first, or those
        that are the state that `like` has placed or trained, or parts of it.
      state_argnames: their names.

    Returns:
      A `ShardedEvalStep`.

    Raises:
      OptionError: an option that cannot be obeyed.
      MeshError: a mesh or axis that does not fit (some of it when first called).

    Reference:
      Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory Optimizations Toward Training Trillion Parameter
      Models", 2020, section 5.3: parameters in shards, gathered for the forward pass and freed after it.
      Aminabadi et al.: "DeepSpeed Inference: Enabling Efficient Inference of Transformer Models at
      Unprecedented Scale", 2022, section VI: ZeRO-Inference, with weights in host memory.
    """
    if gather not in _GATHER:
        raise OptionError(message(
            WHO, f"gather={gather!r}", "Parameters are gathered 'per_pass' or 'once_per_step'.",
            "Drop it to gather them where they are used."))  # fmt: skip
    if not isinstance(like, ShardedTrainStep | None):
        raise OptionError(message(
            WHO, f"like is {a_type(like)}", "It is the train step whose state is read.",
            "Pass what shard_train_step returned."))  # fmt: skip
    if like is not None and (mesh is not None or axis_names is not None):
        raise OptionError(message(
            WHO, "both like and a mesh of its own", "A state is read on the mesh on which it rests.",
            "Drop mesh and axis_names, or use like=train_step.on_mesh(mesh)."))  # fmt: skip
    make = functools.partial(
        ShardedEvalStep, like=like, gather=gather, max_gather_bytes=max_gather_bytes,
        tile_bytes=tile_bytes, offload_params=offload_params, weight_dtype=weight_dtype, mesh=mesh,
        axis_names=axis_names,
        static_argnums=static_argnums, static_argnames=static_argnames, in_specs=in_specs,
        state_argnums=state_argnums, state_argnames=state_argnames,
    )  # fmt: skip
    return make if eval_step is None else make(eval_step)


class ShardedEvalStep(ShardedStep[StepArgs, Result]):
    """A function of a state that lives in shards; see `shard_eval_step` for how it behaves.

    Attributes:
      __wrapped__: the function it was made from.
    """

    _who: ClassVar[str] = WHO

    def __init__(
        self, eval_step: Callable[StepArgs, Result], *, like: ShardedTrainStep | None, gather: str | None,
        max_gather_bytes: int, tile_bytes: int | None, offload_params: Policy | None, weight_dtype: Any,
        mesh: Any,
        axis_names: str | Sequence[str] | None,
        static_argnums: int | Sequence[int], static_argnames: str | Sequence[str],
        in_specs: Mapping[str | int, Any] | None, state_argnums: int | Sequence[int] | None,
        state_argnames: str | Sequence[str],
    ):  # fmt: skip
        if not callable(eval_step):
            raise OptionError(message(
                WHO, f"eval_step is {a_type(eval_step)}", "It must be a function.",
                "Write shard_eval_step(eval_step, like=train_step)."))  # fmt: skip
        with called_as(WHO):
            signature = Signature.of(
                eval_step, static_argnums, static_argnames, in_specs, state_argnums, state_argnames
            )
            own: dict[str, Any] = dict(
                gather=gather,
                max_gather_bytes=max_gather_bytes,
                tile_bytes=tile_bytes,
                weight_dtype=weight_dtype,
                offload=reading_backend(
                    WHO, offload_params, None if like is None else like.offload_params
                ),
                who=WHO,
            )
            if like is None:
                names = axis_tuple(axis_names)
                programs = Programs(eval_step, signature, Options(**own), mesh, names, None, True)
            else:
                programs = like.programs_to_evaluate(eval_step, signature, own)
        super().__init__(eval_step, programs)

    @takes_explicit_axes
    def rows(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """A state in plain arrays, for a checkpoint: of leaves in codes their rows, others as they are.

        Of a state of `jax.ShapeDtypeStruct`s, with the step's other arguments, the same with shardings: what
        a checkpoint of rows is restored to, with no need for the weights that were coded. `from_rows` makes a
        state of what was restored. Rows are those of one mesh: as many devices must read them. They lie as
        the weights lay that were coded: if these were on devices, shapes must have their shardings
        (`train_step.state_shardings`), or they are taken to lie as `shard` places what comes from the host.

        >>> import jax, jax.numpy as jnp, jzero
        >>> eval_step = jzero.shard_eval_step(lambda w, x: x @ w, weight_dtype=jnp.int4)
        >>> x, w = jnp.ones((8, 256)), jnp.ones((256, 256))
        >>> coded = eval_step.shard(w, x)
        >>> saved = eval_step.rows(coded)  # for Orbax, or whoever takes arrays
        >>> shape = jax.ShapeDtypeStruct(w.shape, w.dtype)
        >>> eval_step.rows(shape, x).shape == saved.shape
        True
        >>> eval_step.from_rows(saved, shape, x)
        LeafArray(shape=(256, 256), dtype=float32, int4 in blocks of 128)

        Raises:
          OptionError: of shapes, without the step's other arguments.
        """
        leaves, tree = jax.tree.flatten(state)
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
            return jax.tree.unflatten(tree, map(rows_of, leaves))
        with self._asked("rows"):
            plans, shardings = self._leaf_plans(state, args, kwargs)
        full = NamedSharding(self._programs.setting.mesh, PartitionSpec())
        return jax.tree.unflatten(tree, [
            jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=place) if plan.codes
            else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=full if plan.padding else place)
            for x, plan, place in zip(leaves, plans, shardings, strict=True)
        ])  # fmt: skip

    @takes_explicit_axes
    def from_rows(self, rows: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        """The state of which these are the `rows`; what its codes have lost is not known any more.

        Args:
          rows: what `rows` gave, on host or devices.
          state: its shapes, in the same structure, with the shardings of what `rows` says.
          *args: the step's other arguments, or their shapes.
          **kwargs: the same by name.

        Raises:
          StateError: they are no rows of this state on this mesh.
        """
        with self._asked("from_rows"):
            plans, shardings = self._leaf_plans(state, args, kwargs)
            leaves, tree = jax.tree.flatten(rows)
            structure: Any = jax.tree.structure(state)
            if structure != tree:
                raise StateError(message(
                    "from_rows", f"{len(leaves)} leaves of rows, and a state of {len(plans)}",
                    "Rows have the structure of their state.",
                    "Pass what rows gave, and the shapes of that state."))  # fmt: skip
            bad = [
                f"{plan.path} is {getattr(x, 'dtype', type(x).__name__)}{list(jax.numpy.shape(x))}, and its "
                f"rows are uint8{list(plan.shape)}"
                for x, plan in zip(leaves, plans, strict=True)
                if plan.codes
                and (getattr(x, "dtype", None), jax.numpy.shape(x)) != ("uint8", plan.shape)
            ]
            if bad:
                raise StateError(message(
                    "from_rows", bad, "Rows are of one format, and of the parts of as many devices.",
                    "Use the weight_dtype, the mesh and the like= with which they were made, and shapes with "
                    "the shardings of the weights if these lay on devices; or shard the weights themselves.",
                    shown=4))  # fmt: skip
            coded = [
                LeafArray(x, plan.codes.shape, plan.codes) if plan.codes else x
                for x, plan in zip(leaves, plans, strict=True)
            ]
            placed = self._placement.place(
                jax.tree.unflatten(tree, coded), coded, plans, shardings, "from_rows"
            )
        return jax.tree.unflatten(tree, _placing.wrap(placed, plans))

    @takes_explicit_axes
    def __call__(self, *args: StepArgs.args, **kwargs: StepArgs.kwargs) -> Result:
        """What `eval_step(state, *args)` returns; nothing is consumed.

        Raises:
          StateError, BatchError, StepError: see the message.
          ProcessError: several processes are about to run different programs, or one does not come.
        """
        with self._asked(WHO):
            bound = self._programs.bind(self._given(args), kwargs)
            call = FlatCall.of(bound, self._programs.setting)
            use = Use(WHO, call.call.state, consumes=False)
            try:
                inputs = self._placement.inputs(call)
                if inputs is None:
                    program, _, outs = self._run_traced(call)
                else:
                    program, state, arrays = inputs
                    unread = program.plan.unread
                    read = [None if i in unread else x for i, x in enumerate(call.state)]
                    with use.running:
                        use.claim(read)
                        _, outs = _nan_checks.run(
                            WHO, program.step, state, arrays, program.plan.leaves
                        )
            except Exception as error:
                if (explained := use.explained(error, call.state, call.call.arrays)) is not None:
                    raise explained from error
                raise
        return call.call.given(jax.tree.unflatten(program.out_tree, outs))
