"""Loses a process in the middle of a training, goes on with half as many, and compares the loss curve.

python experiments/elastic/elastic.py               # about 4 minutes
python experiments/elastic/elastic.py --steps 40 --out /tmp/elastic

The training is experiments/train_lm/train_linen.py at stage 3: four processes of two virtual CPU devices
each (gloo on this machine), of which the last one is killed; then two processes, also of two devices each,
go on from the latest checkpoint with the same global batch. The reference is one process with eight devices.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.shared import pictures, records, training

HERE = Path(__file__).parent


def start(folder: Path, options: list[str], num_processes: int) -> list[subprocess.Popen]:
    """The processes of one training, with two devices each; a single one has eight."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environment = dict(os.environ)
    num_devices = 8 if num_processes == 1 else 2 * num_processes
    options = [*options, "--devices", str(num_devices), "--out", str(folder)]
    if num_processes > 1:
        environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
        environment["JAX_NUM_PROCESSES"] = str(num_processes)
    folder.mkdir(exist_ok=True)
    processes = []
    for i in range(num_processes):
        with open(folder / f"{num_processes}-{i}.log", "w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(training.SCRIPT), *options],
                    env={**environment, "JAX_PROCESS_ID": str(i)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def finish(processes: list[subprocess.Popen], folder: Path) -> None:
    statuses = [process.wait() for process in processes]
    if any(statuses):
        logs = sorted(folder.glob("*.log"))
        raise RuntimeError("\n".join(f"---- {log.name}\n{log.read_text()[-2000:]}" for log in logs))


def kill_one(processes: list[subprocess.Popen], at: Path) -> float:
    """Kills the last process once the checkpoint `at` is there; after how many seconds all have ended."""
    while not at.exists():
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a process ended before {at}")
        time.sleep(0.05)
    processes[-1].kill()
    killed = time.monotonic()
    statuses = [process.wait() for process in processes]
    if 0 in statuses:
        raise RuntimeError(f"a process ended as if nothing were wrong: {statuses}")
    return time.monotonic() - killed


def elastic(folder: Path, options: list[str], at: int) -> tuple[int, float, dict[int, float]]:
    """The step that two processes went on from, the seconds that the others took to end, and all losses."""
    seconds = kill_one(start(folder, options, 4), folder / "checkpoints" / str(at))
    steps = (folder / "checkpoints").iterdir()
    went_on = max(int(path.name) for path in steps if path.name.isdigit())
    finish(start(folder, options, 2), folder)
    return went_on, seconds, training.losses(folder)


def plot(path: Path, whole: dict[int, float], rest: dict[int, float], went_on: int) -> None:
    with pictures.drawn(path, 2, 1, figsize=(8, 6.5), sharex=True, height_ratios=[2, 1]) as (
        _,
        (top, bottom),
    ):
        top.plot(
            list(whole),
            list(whole.values()),
            color="#90caf9",
            linewidth=6,
            label="1 process, 8 devices",
        )
        parts = {
            "4 processes, 8 devices": ([i for i in rest if i <= went_on], "#0d47a1"),
            "2 processes, 4 devices": ([i for i in rest if i >= went_on], "#e65100"),
        }
        for label, (steps, color) in parts.items():
            top.plot(steps, [rest[i] for i in steps], color=color, linewidth=1.5, label=label)
            bottom.plot(steps, [abs(rest[i] - whole[i]) for i in steps], color=color)
        for axes in (top, bottom):
            axes.axvline(went_on, color="#616161", linewidth=1, linestyle="--")
            axes.grid(alpha=0.3)
        top.annotate(
            " one of four\n processes killed", (went_on, 0.6), xycoords=("data", "axes fraction")
        )
        top.set(ylabel="loss (nats per byte)", title="byte-level GPT at stage 3, one global batch")
        top.legend()
        bottom.set(xlabel="step", ylabel="|difference|\n(nats per byte)")
        bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))


def main() -> None:
    args = training.parse_args(__doc__, HERE / "results")
    at = args.steps // 2 // args.save_every * args.save_every
    with tempfile.TemporaryDirectory() as name:
        options = ["--steps", str(args.steps), "--save-every", str(args.save_every)]
        finish(start(Path(name, "whole"), options, 1), Path(name, "whole"))
        whole = training.losses(Path(name, "whole"))
        checkpoints = ["--checkpoints", str(Path(name, "elastic", "checkpoints"))]
        went_on, seconds, rest = elastic(Path(name, "elastic"), options + checkpoints, at)
    result: dict[str, Any] = {
        **records.versions("jax", "flax", "optax", "orbax-checkpoint"),
        "steps": args.steps,
        "goes_on_after": went_on,
        "seconds_until_all_had_ended": round(seconds, 1),
        "max_abs_difference": max(abs(rest[i] - whole[i]) for i in rest),
    }
    stem = args.out / result["date"]
    records.write(stem.with_suffix(".json"), result)
    plot(stem.with_suffix(".png"), whole, rest, went_on)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
