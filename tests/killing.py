"""Kills a training at operations on files, and looks at what it left: `python tests/killing.py --rounds 300`.

After every kill the latest step must be there, as far as the training had heard that one was complete, and
its leaves must be those of a training that nobody killed, bit for bit. Each training goes on where the one
before was killed, with all that it left behind.
"""

import argparse
import contextlib
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import faults
import jzero
from faults._library import armed

NUM_STEPS = 10_000  # more than a child ever gets to
NUM_OPERATIONS = 400  # a child is killed at one of the first; a save and a deletion have about 70
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


def new_train_step(on_host: bool) -> jzero.ShardedStep:
    offload = jzero.HostCPU() if on_host else jzero.NoOffload()
    return jzero.shard_train_step(step_fn, memory=offload)


def train(
    say: Callable[[Any], None], directory: str, on_host: bool, fault: Sequence[Any] | None = None
) -> None:
    """A child's life: goes on from the latest step, saves every one, says which are complete.

    Told to end by SIGTERM, it does.
    """
    train_step = new_train_step(on_host)
    with contextlib.ExitStack() as stack:
        if fault:
            stack.enter_context(armed(directory, faults.Fault(*fault)))
        checkpointer = stack.enter_context(jzero.Checkpointer(directory, train_step, max_to_keep=3))
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
                say(step)


class Reference:
    """The same training, never killed."""

    def __init__(self, on_host: bool = False) -> None:
        self.train_step = new_train_step(on_host)
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


def run(
    children: faults.Children, directory: str, rounds: int, seed: int, on_host: bool = False
) -> list[int]:
    """Kills `rounds` children, each at some operation on a file; the latest step after each."""
    rng, reference, steps = random.Random(seed), Reference(on_host), []
    for _ in range(rounds):
        fault = faults.Fault("kill", rng.randint(1, NUM_OPERATIONS))
        ended = children.run("killing:train", directory=directory, on_host=on_host, fault=fault)
        assert ended.status == -9, f"the training ended by itself: {ended}"
        steps.append(check(directory, max(ended.said, default=0), reference))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-host", action="store_true", help="optimizer state on the host")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, faults.Children(["killing"]) as children:
        steps = run(children, folder, args.rounds, args.seed, args.on_host)
    progress = sum(after > before for before, after in itertools.pairwise([0, *steps]))
    print(
        f"{len(steps)} kills, {progress} of them after a new step was complete, {steps[-1]} steps in all"
    )


if __name__ == "__main__":
    flag = "--xla_force_host_platform_device_count=8"
    order = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag} {order}"
    main()
