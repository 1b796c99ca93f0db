"""What a user writes who type-checks; tests/test_typed.py runs mypy over it, and nothing runs it.

A comment behind `reveal_type` is what mypy must say there.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, reveal_type

import jax
import optax

import jzero
from jzero.testing import Tolerance, assert_collectives, assert_same_training

State = tuple[dict[str, jax.Array], optax.OptState]


def step_fn(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    return state, batch.sum()


def init_fn(key: jax.Array) -> State:
    raise NotImplementedError


@jzero.shard_train_step(stage=2, microbatches=4)
def decorated(state: State, batch: jax.Array, *, dropout: bool) -> tuple[State, jax.Array]:
    return state, batch.sum()


@jzero.shard_eval_step(like=decorated)
def accuracy(state: State, batch: jax.Array) -> dict[str, jax.Array]:
    return {"accuracy": batch.mean()}


def made(batch: jax.Array) -> None:
    step = jzero.shard_train_step(step_fn, stage=3, memory=jzero.HostCPU())
    state = step.init(init_fn, jax.random.key(0))
    reveal_type(state)  # tuple[dict[str, jax._src.basearray.Array], Any]
    new_state, loss = step(state, batch=batch)
    reveal_type(new_state[0])  # dict[str, jax._src.basearray.Array]
    reveal_type(loss)  # jax._src.basearray.Array
    reveal_type(step.unshard(new_state)[0])  # dict[str, jax._src.basearray.Array]
    reveal_type(step.flush(new_state)[0])  # dict[str, jax._src.basearray.Array]
    reveal_type(step.__wrapped__(state, batch)[1])  # jax._src.basearray.Array
    reveal_type(step.on_mesh(None)(state, batch)[1])  # jax._src.basearray.Array
    reveal_type(decorated(state, batch, dropout=True)[1])  # jax._src.basearray.Array
    reveal_type(accuracy(state, batch))  # dict[str, jax._src.basearray.Array]
    _, loss = jzero.shard_eval_step(step_fn, like=step)(state, batch)
    reveal_type(loss)  # jax._src.basearray.Array
    step(state)  # error: [call-arg]
    step(batch, batch)  # error: [arg-type]
    step.init(init_fn)  # error: [call-arg]
    decorated(state, batch)  # error: [call-arg]
    accuracy(state, "batch")  # error: [arg-type]


def train(state: State, batch: jax.Array, step: jzero.ShardedStep) -> None:
    policy = jzero.PinnedHost(device_bytes=2**30)
    reveal_type(policy.device_bytes)  # int
    jzero.shard_train_step(
        step_fn, stage=2, memory=jzero.Memory(optimizer=policy, params=jzero.NoOffload())
    )
    jzero.shard_train_step(step_fn, memory=jzero.HostCPU(ratio=0.5, delayed_update=True))
    jzero.shard_train_step(step_fn, memory=jzero.NVMe("/nvme/run", host_bytes=2**30))
    codes = jzero.Blocks(jax.numpy.int4, rotate=True)
    reveal_type(codes.nbytes(1024))  # int
    jzero.shard_train_step(
        step_fn, comm=jzero.Comm(gather_dtype=jax.numpy.int8, reduce_dtype={"data": codes})
    )
    files = jzero.NVMe("/nvme/run", device_bytes=2**31)
    jzero.shard_train_step(
        step_fn, memory=jzero.Memory(optimizer=jzero.NVMe("/nvme/run"), params=files)
    )
    reveal_type(step(state, batch))  # Any
    reveal_type(str(step.describe(state, batch)))  # str


def evaluate(step: jzero.ShardedStep, score: jzero.ShardedStep) -> None:
    jzero.shard_eval_step(step_fn, like=step)
    reveal_type(score.shard(jax.numpy.ones(8)))  # Any


def save(folder: Path, step: jzero.ShardedStep, state: State) -> None:
    with jzero.Checkpointer(folder, step, max_to_keep=3) as checkpointer:
        reveal_type(checkpointer)  # jzero.checkpoint._checkpointer.Checkpointer
        reveal_type(checkpointer.save(1, state))  # bool
        reveal_type(checkpointer.latest_step())  # int | None
        reveal_type(checkpointer.preempted(1))  # bool
        reveal_type(jzero.restore(folder / "1", step, state))  # Any
    rule = jzero.WeightRule("lm_head.weight", "lm_head/kernel", "out d -> d out")
    layout: jzero.WeightLayout = jzero.LAYOUTS["llama"].extended(rule)
    reveal_type(jzero.import_weights("in.safetensors", folder / "in", layout=layout))  # int
    exported = jzero.export_weights(folder, "out.safetensors", layout=layout)
    reveal_type(exported.left_out)  # list[str]


def plan(step: jzero.ShardedStep, state: State, batch: jax.Array) -> None:
    estimate: jzero.Estimate = jzero.estimate("7.5B", devices=64)
    reveal_type(estimate.num_params)  # int
    jzero.estimate(
        {"model_type": "llama"},
        devices={"node": 8, "local": 8},
        axes=jzero.Axes(params="local"),
        microbatches=jzero.Microbatches(4, reduce="once"),
        bytes_per_param=jzero.BytesPerParam(optimizer=6),
        workload=jzero.Workload(tokens="8K"),
        rates=jzero.Rates(peak="989TFLOP/s"),
    )
    jzero.estimate("7.5B")  # error: [call-arg]
    preflight: jzero.Preflight = jzero.preflight(step, state, batch, target="h200")
    reveal_type(preflight.peak_bytes)  # int
    reveal_type(jzero.target_mesh("h200", "8x8"))  # jax._src.mesh.Mesh
    found: jzero.BandwidthReport = jzero.bandwidth(nbytes="1MiB")
    reveal_type(found.num_devices)  # int
    translated = jzero.from_deepspeed({"train_batch_size": 8}, devices=8, auto={"bf16": True})
    reveal_type(translated.python())  # str


def inside(x: jax.Array, key: jax.Array) -> jax.Array:
    grad: Callable[..., Any] = jzero.grad(lambda x: (x**2).sum())
    loss, grads = jzero.value_and_grad(lambda x: (x**2).sum())(x)
    normed = jzero.groups(lambda x: x - x.mean(), 4)(x)
    reveal_type(jzero.fold_device_index(key))  # jax._src.basearray.Array
    reveal_type(jzero.per_example(lambda x: x + 1)(normed))  # Any
    print(grad(x), loss, grads)
    return x


def optimizers() -> optax.GradientTransformation:
    tx = jzero.master_weights(optax.adamw(1e-3))
    return jzero.stochastic_rounding(tx, seed=1)


def frameworks(model: Any, optimizer: Any) -> None:
    nnx_step, nnx_state = jzero.from_nnx(step_fn, model, optimizer)
    eqx_step, eqx_state = jzero.from_eqx(step_fn, model)
    _, (_, loss) = jzero.shard_train_step(nnx_step)(nnx_state, 1)
    reveal_type(loss)  # jax._src.basearray.Array
    reveal_type(jzero.shard_train_step(eqx_step)(eqx_state, 1))  # tuple[Any, Any]


def leaves(
    leaf: jzero.LeafArray,
) -> None:
    reveal_type(leaf.shape)  # tuple[int, ...]


def errors(error: Exception) -> str:
    match error:
        case jzero.OptionError() | jzero.MeshError() | jzero.StepError() | jzero.BatchError():
            return "the call"
        case jzero.StateError() | jzero.CheckpointError() | jzero.ProcessError():
            return "the state"
        case jzero.MismatchError() | jzero.JzeroError():
            return str(error)
    return jzero.__version__


def promises(batch: jax.Array, state: State) -> None:
    tolerance = Tolerance(rtol=1e-5, leaf_rtol=1e-5)
    assert_same_training(step_fn, lambda: state, [batch], stage=3, tolerance=tolerance)
    assert_collectives(jzero.shard_train_step(step_fn), state, batch, {"all-gather": 8})


jzero.shard_train_step(step_fn, stag=3)  # error: [call-overload] [call-overload]
jzero.shard_train_step(step_fn, stage="3")  # error: [call-overload]
jzero.shard_train_step(3)  # error: [call-overload]
jzero.shard_eval_step(step_fn, lik=decorated)  # error: [call-overload] [call-overload]
jzero.estimate(7.5, device=64)  # error: [call-arg]
jzero.PinnedHost(device_bytes="1GiB")  # error: [arg-type]
jzero.Checkpointer(1, None)  # error: [arg-type] [arg-type]
