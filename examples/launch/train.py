"""Trains a small model on all devices of all processes: the program that the other files here start.

python examples/launch/train.py --steps 20 --checkpoints FOLDER      # the same again goes on
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero

tx = optax.adamw(1e-2)


def connect() -> None:
    """Joins the other processes, if there are any. Call it before JAX touches a device."""
    if "JAX_NUM_PROCESSES" in os.environ:  # set by jobset.yaml, by ray_launch.py, or by hand
        jax.distributed.initialize(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            int(os.environ["JAX_NUM_PROCESSES"]),
            int(os.environ["JAX_PROCESS_ID"]),
            # Ray may run under Slurm, whose variables would give this process one GPU.
            cluster_detection_method="deactivate",
        )
    elif "SLURM_STEP_NUM_TASKS" in os.environ:  # set by srun, whose other variables JAX reads
        jax.distributed.initialize()


def init_fn(key):
    params = {"w": jax.random.normal(key, (64, 64)) / 8}
    return params, tx.init(params)


def step_fn(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p["w"] - batch) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def own_rows(step, batch_size):
    """This process's part of a batch that follows from the number of the step."""
    batch = np.random.default_rng(step).standard_normal((batch_size, 64), np.float32)
    return np.split(batch, jax.process_count())[jax.process_index()]


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="rows over all devices")
    parser.add_argument("--checkpoints", help="a folder that all machines see")
    args = parser.parse_args(argv)
    connect()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    by_rows = jax.NamedSharding(mesh, jax.P("data"))
    train_step = jzero.shard_train_step(step_fn, mesh=mesh)
    state, loss, step = train_step.init(init_fn, jax.random.key(0)), jnp.nan, 0
    checkpointer = jzero.Checkpointer(args.checkpoints, train_step) if args.checkpoints else None
    if checkpointer and (latest := checkpointer.latest_step()):
        step = latest
        state = checkpointer.restore(jax.eval_shape(init_fn, jax.random.key(0)))
    first, stop = step, False
    while step < args.steps and not stop:
        rows = own_rows(step, args.batch_size)
        state, loss = train_step(state, jax.make_array_from_process_local_data(by_rows, rows))
        step += 1
        stop = bool(checkpointer and checkpointer.preempted(step))  # SIGTERM: save, and end
    if checkpointer:
        if step > first:
            checkpointer.save(step, state)
        checkpointer.close()
    if jax.process_index() == 0:
        print(
            f"processes {jax.process_count()}, devices {jax.device_count()}, "
            f"steps {first} to {step}, loss {loss:.6f}",
            flush=True,
        )
    return float(loss)


if __name__ == "__main__":
    main()
