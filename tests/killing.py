"""Kills a training at random moments, and looks at what it left: `python tests/killing.py --rounds 300`.

After every kill the latest step must be there, as far as the training had heard that one was complete, and
its leaves must be those of a training that nobody killed, bit for bit.
"""

import argparse
import itertools
import multiprocessing
import os
import random
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero

NOWHERE = jzero.NoOffload()
NUM_STEPS = 10_000  # more than a child ever gets to
TX = optax.adam(1e-3)


def step_fn(state, batch):
    params, opt_state = state
    grads = jax.grad(lambda p: jnp.mean((batch @ p["w"] - p["b"][None]) ** 2))(params)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def new_state():
    params = {"w": jax.random.normal(jax.random.key(0), (300, 701)), "b": jnp.zeros(701)}
    return params, TX.init(params)


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).standard_normal((8, 300)).astype(np.float32)


def train(directory: str, complete: Any, offload: Any = NOWHERE) -> None:
    """A child's life: goes on from the latest step, saves every one, says which are complete.

    Told to end by SIGTERM, it does.
    """
    train_step = jzero.shard_train_step(step_fn, offload=offload)
    with jzero.Checkpointer(directory, train_step, max_to_keep=3) as checkpointer:
        start = checkpointer.latest_step()
        if start is None:
            start, state = 0, train_step.init(new_state)
        else:
            state = checkpointer.restore(jax.eval_shape(new_state))
        for step in range(start + 1, NUM_STEPS):
            state = train_step(state, batch(step))
            stop = checkpointer.preempted(step)
            checkpointer.save(step, state, force=stop)
            if stop:
                break
            if step % 3 == 0:
                checkpointer.wait()
                complete.value = step


class Reference:
    """The same training, never killed."""

    def __init__(self, offload: Any = NOWHERE) -> None:
        self.train_step = jzero.shard_train_step(step_fn, offload=offload)
        self.step, self.state = 0, self.train_step.init(new_state)

    def at(self, step: int) -> Any:
        """The state after `step` steps, no fewer than last time."""
        for i in range(self.step, step):
            self.state = self.train_step(self.state, batch(i + 1))
        self.step = step
        return self.state


def check(directory: str, complete: int, reference: Reference) -> int:
    """The latest step, after it was found to be right."""
    with jzero.Checkpointer(directory, reference.train_step) as checkpointer:
        latest = checkpointer.latest_step() or 0
        assert latest >= complete, f"step {complete} was complete, and the latest one is {latest}"
        if latest:
            state = checkpointer.restore(jax.eval_shape(new_state))
            for x, y in zip(*map(jax.tree.leaves, (state, reference.at(latest))), strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    return latest


def start(directory: str, offload: Any = NOWHERE) -> tuple[Any, Any]:
    """A child process, and the number of the latest step that it says is complete."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jzero"])
    complete = context.Value("i", 0)
    child = context.Process(target=train, args=(directory, complete, offload))
    child.start()
    return child, complete


def run(
    directory: str, rounds: int, seconds: float, seed: int, offload: Any = NOWHERE
) -> list[int]:
    """Kills `rounds` children, each within so many seconds after its start; the latest step after each."""
    rng, reference, steps = random.Random(seed), Reference(offload), []
    for _ in range(rounds):
        child, complete = start(directory, offload)
        time.sleep(rng.uniform(0, seconds))
        child.kill()
        child.join()
        assert child.exitcode == -9, f"the training ended by itself with {child.exitcode}"
        steps.append(check(directory, complete.value, reference))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="a child lives at most this long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-host", action="store_true", help="optimizer state on the host")
    args = parser.parse_args()
    offload = jzero.HostCPU() if args.on_host else NOWHERE
    with tempfile.TemporaryDirectory() as directory:
        steps = run(directory, args.rounds, args.seconds, args.seed, offload)
    progress = sum(after > before for before, after in itertools.pairwise([0, *steps]))
    print(
        f"{len(steps)} kills, {progress} of them after a new step was complete, {steps[-1]} steps in all"
    )


if __name__ == "__main__":
    flag = "--xla_force_host_platform_device_count=8"
    order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag} {order}"
    main()
