"""What both sides share: settings, weights and batches as NumPy arrays, a worker's life, probes.

Imports neither JAX nor torch: a worker has only one of them in its memory.
"""

import ctypes
import dataclasses
import importlib
import os
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# ---------------------------------------------------------------------------------------------
# model: a pre-LN GPT without biases, learned positions, the embedding also being the output layer
vocab_size = 2048
context = 128
num_layers = 6
num_heads = 6
dim = 384
norm_epsilon = 1e-5

# training: float32 throughout
num_processes = 2
batch_size = 4  # sequences per process
num_batches = 4  # different ones, in turns
adamw = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

# of every worker, before it imports JAX or torch
environment = {
    "JAX_PLATFORMS": "cpu",
    # One thread each. It also keeps XLA's collectives in the program's order, which processes that
    # talk over gloo must agree on (docs/facts.md#gloo-pairs-collectives-by-order-alone).
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "PJRT_NPROC": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# ---------------------------------------------------------------------------------------------


def initial_weights() -> dict[str, Any]:
    """Matrices are [in, out]; `blocks` is one dict per layer."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape)).astype(np.float32)

    def block() -> dict[str, np.ndarray]:
        return {
            "norm_1": np.ones(dim, np.float32),
            "qkv": matrix(dim, 3 * dim),
            "project": matrix(dim, dim),
            "norm_2": np.ones(dim, np.float32),
            "up": matrix(dim, 4 * dim),
            "down": matrix(4 * dim, dim),
        }

    return {
        "embed": matrix(vocab_size, dim),
        "positions": matrix(context, dim),
        "blocks": [block() for _ in range(num_layers)],
        "norm": np.ones(dim, np.float32),
    }


def num_parameters() -> int:
    weights = initial_weights()
    blocks = [block.values() for block in weights.pop("blocks")]
    return sum(leaf.size for leaves in [*blocks, weights.values()] for leaf in leaves)


def local_batches(rank: int) -> list[np.ndarray]:
    """This process's part of every batch: int32[batch_size, context + 1].

    Tokens are squared uniform variates, so that there is something to learn: their frequencies.
    """
    rng = np.random.default_rng(1)
    shape = (num_batches, num_processes, batch_size, context + 1)
    tokens = (vocab_size * rng.random(shape) ** 2).astype(np.int32)
    return list(tokens[:, rank])


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a worker is told when it starts.

    Attributes:
      connection: to the driver.
      module: its file, with `connect(setup)` and `Trainer(setup)`.
      rank: of this process.
      port: where the processes of one side meet.
      variant: what is to be trained; each worker knows its own.
      alone: one process, which sees the batches of rank 0 and talks to nobody.
    """

    connection: Connection
    module: str
    rank: int
    port: int
    variant: str
    alone: bool


class Trainer(Protocol):
    """One side's model and state in one process."""

    def step(self, index: int) -> float:
        """Trains on batch `index`; the mean loss over all processes, once the step is done."""

    def traffic(self) -> dict[str, int]:
        """Bytes of the whole values that one step gathers and reduces, by collective."""

    def bytes_at_rest(self) -> int:
        """Bytes of parameters and optimizer state in this process."""


def work(setup: Setup) -> None:
    """A worker's life: does what the driver says, and sleeps in `recv` between its messages."""
    pin(setup.rank)
    os.environ.update(environment)
    worker = importlib.import_module(setup.module)
    worker.connect(setup)
    baseline = memory()["now"]
    trainer: Trainer = worker.Trainer(setup)
    connection = setup.connection
    done, cpu = 0, cpu_seconds()
    while (message := connection.recv()) != "stop":
        if message == "memory":
            connection.send({"baseline": baseline, **memory()})
        elif message == "bytes at rest":
            connection.send(trainer.bytes_at_rest())
        elif message == "traffic":
            connection.send(trainer.traffic())
        elif message == "forget peak":
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what building and compiling has freed
            Path("/proc/self/clear_refs").write_text("5")
            connection.send(None)
        else:  # a number of steps
            idle, cpu = cpu_seconds() - cpu, cpu_seconds()
            losses, times = [], [time.perf_counter()]
            for index in range(done, done + message):
                losses.append(trainer.step(index % num_batches))
                times.append(time.perf_counter())
            done, start, cpu = done + message, cpu, cpu_seconds()
            connection.send({
                "losses": losses,
                "seconds": np.diff(times).tolist(),
                "cpu_seconds": (cpu - start) / message,
                "idle_cpu_seconds": idle,
            })  # fmt: skip


def pin(rank: int) -> None:
    """This process and all its threads to one core: the same for both sides, whatever they start."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory() -> dict[str, int]:
    """Bytes of this process that are resident now, and the most that were (since 'forget peak')."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {
        "now": 1024 * int(fields["VmRSS"].split()[0]),
        "peak": 1024 * int(fields["VmHWM"].split()[0]),
    }


def loopback_bytes() -> int:
    """All bytes that this machine has sent to itself, headers included."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[9])
