"""Trains one small GPT by jzero and by PyTorch's FSDP2, in turns: time, memory, bytes on the wire.

make fsdp2                                                   # creates .venv-fsdp2, runs this
.venv-fsdp2/bin/python experiments/fsdp2/compare.py --help

All processes of all sides live from start to end. In each round every side in turn trains for a few
steps while the others sleep, so that all of them see the same machine. Writes <date>.json and .png.
"""

import argparse
import multiprocessing
import os
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import common
from experiments.shared import records

# Name: module, variant, alone. Those alone are one process on one core and talk to nobody: what
# the two compilers and libraries of kernels do with the model, before anything is sharded.
SIDES: dict[str, tuple[str, str, bool]] = {
    "FSDP2": ("fsdp2_worker", "eager", False),
    "FSDP2, compiled": ("fsdp2_worker", "compiled", False),
    "jzero, unrolled": ("jzero_worker", "unrolled", False),
    "jzero, scanned": ("jzero_worker", "scanned", False),
    "torch alone": ("fsdp2_worker", "eager", True),
    "jax.jit alone, unrolled": ("jzero_worker", "unrolled", True),
    "jax.jit alone, scanned": ("jzero_worker", "scanned", True),
}
patience = 300  # seconds that a side may take to answer
HERE = Path(__file__).parent


class Side:
    """The processes that train together."""

    def __init__(self, name: str) -> None:
        module, variant, alone = SIDES[name]
        self.name = name
        self.losses: list[float] = []
        self.blocks: list[dict[str, Any]] = []
        self.whole_run: list[dict[str, int]] = []  # memory once compiled, per process
        self.in_steps: list[dict[str, int]] = []
        self.bytes_at_rest = 0
        self.traffic: dict[str, int] = {}
        context = multiprocessing.get_context("spawn")  # a fresh interpreter, and so its own peak
        port = free_port()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(1 if alone else common.num_processes):
            ours, theirs = context.Pipe()
            setup = common.Setup(theirs, module, rank, port, variant, alone)
            process = context.Process(target=common.work, args=(setup,), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def ask(self, message: Any) -> list[Any]:
        """Every process's answer."""
        for connection in self.connections:
            connection.send(message)
        for connection in self.connections:
            if not connection.poll(patience):
                raise TimeoutError(f"{self.name}: no answer to {message!r} in {patience} s")
        return [connection.recv() for connection in self.connections]

    def run(self, steps: int) -> dict[str, Any]:
        """Trains for some steps; numbers per step, and per process where they differ."""
        before = common.loopback_bytes()
        answers = self.ask(steps)
        wire = common.loopback_bytes() - before
        self.losses += answers[0]["losses"]
        return {
            # A step is done when its last process is.
            "seconds": np.max([answer["seconds"] for answer in answers], axis=0).tolist(),
            "cpu_seconds": [answer["cpu_seconds"] for answer in answers],
            "idle_cpu_seconds": [answer["idle_cpu_seconds"] for answer in answers],
            "loopback_bytes": wire / steps / len(self.processes),
        }

    def stop(self) -> None:
        for connection in self.connections:
            connection.send("stop")
        for process in self.processes:
            process.join(timeout=30)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def measure(sides: list[Side], rounds: int, steps: int) -> float:
    """Runs the rounds; returns the bytes per second that the loopback carries while all sleep."""
    for side in sides:  # one after another: nothing else runs while one compiles
        side.run(2 * common.num_batches)
        side.whole_run = side.ask("memory")
        side.ask("forget peak")
        print(f"{side.name}: losses {np.round(side.losses, 4).tolist()}", flush=True)
    check_losses(sides, tolerance=1e-4)
    start = common.loopback_bytes()
    time.sleep(5)
    idle = (common.loopback_bytes() - start) / 5
    for number in range(rounds):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            side.blocks.append(side.run(steps))
        medians = [f"{side.name} {median_seconds(side.blocks[-1]):.3f} s" for side in sides]
        print(f"round {number}: {', '.join(medians)}", flush=True)
    for side in sides:
        side.in_steps = side.ask("memory")
        side.bytes_at_rest = side.ask("bytes at rest")[0]
        side.traffic = side.ask("traffic")[0] if len(side.processes) > 1 else {}
    return idle


def check_losses(sides: list[Side], tolerance: float) -> None:
    """Sides that see the same batches must train alike from the start.

    Later they part: at a learning rate that learns these few batches by heart, rounding grows. How
    far, between two sides of PyTorch too, is in the result.
    """
    for side in sides:
        difference = loss_difference(side, sides)
        print(
            f"{side.name}: losses differ from {first_alike(side, sides).name}'s by {difference:.1e}"
        )
        if difference > tolerance:
            raise AssertionError(f"{side.name} trains differently, by {difference}")


def loss_difference(side: Side, sides: list[Side]) -> float:
    return float(np.abs(np.subtract(side.losses, first_alike(side, sides).losses)).max())


def median_seconds(block: dict[str, Any]) -> float:
    return float(np.median(block["seconds"]))


def summarize(side: Side, sides: list[Side]) -> dict[str, Any]:
    """One side's numbers; memory and wire per process, in bytes."""
    seconds = np.array([median_seconds(block) for block in side.blocks])
    cpu = [np.mean(block["cpu_seconds"]) for block in side.blocks]
    tokens = common.batch_size * common.context * len(side.processes)
    return {
        "seconds_per_step": float(np.median(seconds)),
        "seconds_per_step_of_blocks": seconds.round(4).tolist(),
        "tokens_per_second": tokens / float(np.median(seconds)),
        "cpu_seconds_per_step": float(np.median(cpu)),
        "idle_cpu_seconds": float(np.max([block["idle_cpu_seconds"] for block in side.blocks])),
        "wire": {
            "loopback_bytes": float(np.median([b["loopback_bytes"] for b in side.blocks])),
            "counted_bytes": ring_bytes(side.traffic, len(side.processes)),
            "counted_whole_values": side.traffic,
        },
        "memory": {
            "baseline": [m["baseline"] for m in side.whole_run],
            "peak_whole_run": [m["peak"] for m in side.whole_run],
            "peak_in_steps": [m["peak"] for m in side.in_steps],
            "at_rest": side.bytes_at_rest,
        },
        "speed_ratios": ratios(side, sides),
        "losses": side.losses,
        "losses_differ_at_most": loss_difference(side, sides),
    }


def ratios(side: Side, sides: list[Side]) -> dict[str, Any] | None:
    """Tokens per second over the first alike side's, round by round: above 1, this one is faster."""
    other = first_alike(side, sides)
    if other is side:
        return None
    pairs = zip(other.blocks, side.blocks, strict=True)
    found = np.array([median_seconds(a) / median_seconds(b) for a, b in pairs])
    return {
        "over": other.name,
        "median": float(np.median(found)),
        "range": [float(found.min()), float(found.max())],
    }


def first_alike(side: Side, sides: list[Side]) -> Side:
    """The first side with as many processes: it sees the same batches, and is what we compare to."""
    return next(other for other in sides if len(other.processes) == len(side.processes))


def ring_bytes(traffic: dict[str, int], n: int) -> float:
    """What a process sends when each collective of its whole value is done by a ring.

    (n - 1) / n of the value for a gather or reduce-scatter, and twice that for an all-reduce.
    """
    times = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    return sum(times[name.split()[0]] * value * (n - 1) / n for name, value in traffic.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="in a block; default: %(default)s")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[*SIDES], metavar="SIDE")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()

    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "optax", "torch", "numpy"),
        "cpu": f"{os.cpu_count()} x {records.processor()}",
        "load_average_before": os.getloadavg(),
    }
    sides = [Side(name) for name in args.sides]
    idle = measure(sides, args.rounds, args.steps)
    result["settings"] = {
        "model": f"{common.num_layers} layers, dim {common.dim}, vocabulary {common.vocab_size}",
        "parameters": common.num_parameters(),
        "tokens_per_process": common.batch_size * common.context,
        "rounds": args.rounds,
        "steps_per_block": args.steps,
        "loopback_bytes_per_second_while_idle": idle,
    }
    result["sides"] = {side.name: summarize(side, sides) for side in sides}
    for side in sides:
        side.stop()
    result["load_average_after"] = os.getloadavg()
    path = args.out / f"{result['date']}.json"
    records.write(path, result)
    from picture import draw  # here, so that matplotlib is not a part of the workers' memory

    draw(result, path.with_suffix(".png"))
    print(f"written: {os.path.relpath(path)} and .png")


if __name__ == "__main__":
    main()
