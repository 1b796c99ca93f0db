"""Interrupts a training twice, and compares it with one that was not: every loss, every leaf, every bit.

python experiments/resume/resume.py                 # about 3 minutes
python experiments/resume/resume.py --steps 40 --out /tmp/resume

The training is experiments/train_lm/train_linen.py at stage 3 on 8 virtual CPU devices. It is sent SIGTERM
after a third of its steps (it saves and ends), SIGKILL after two thirds (it goes back to what was saved).
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from experiments.shared import pictures, records, training

HERE = Path(__file__).parent


def command(folder: Path, steps: int, save_every: int) -> list[str]:
    options = [
        "--steps",
        steps,
        "--save-every",
        save_every,
        "--checkpoints",
        folder / "checkpoints",
    ]
    return [sys.executable, str(training.SCRIPT), *map(str, options), "--out", str(folder)]


def run(command: list[str], interruption: signal.Signals | None = None, at: Path = HERE) -> None:
    """The training, to its end, or until the checkpoint `at` is there and the signal was sent."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while interruption is not None and not at.exists():
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.poll()} before {at}")
        time.sleep(0.05)
    if interruption is not None:
        process.send_signal(interruption)
    expected = -signal.SIGKILL if interruption == signal.SIGKILL else 0
    if process.wait() != expected:
        raise RuntimeError(f"the training ended with {process.returncode}")


def leaves(folder: Path, step: int) -> dict[str, np.ndarray]:
    """What the checkpoint of a step holds, read by Orbax alone."""
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((folder / "checkpoints" / str(step) / "state").absolute())
    flat = ocp.tree.to_flat_dict(tree)
    return {"/".join(key): np.asarray(x) for key, x in flat.items() if x is not None}


def saved_steps(folder: Path) -> list[int]:
    return sorted(
        int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit()
    )


def interrupted(folder: Path, steps: int, save_every: int) -> list[int]:
    """Trains with two interruptions; the steps that the second and third run went on from."""
    checkpoints = folder / "checkpoints"
    first = steps // 3 // save_every * save_every
    run(command(folder, steps, save_every), signal.SIGTERM, checkpoints / str(first))
    starts = [saved_steps(folder)[-1]]
    second = 2 * steps // 3 // save_every * save_every
    run(command(folder, steps, save_every), signal.SIGKILL, checkpoints / str(second))
    starts.append(saved_steps(folder)[-1])
    run(command(folder, steps, save_every))
    return starts


def plot(path: Path, whole: dict[int, float], resumed: dict[int, float], starts: list[int]) -> None:
    with pictures.drawn(path, figsize=(8, 4.5)) as (_, axes):
        axes.plot(
            *zip(*whole.items(), strict=True),
            color="#90caf9",
            linewidth=6,
            label="never interrupted",
        )
        axes.plot(
            *zip(*resumed.items(), strict=True),
            color="#0d47a1",
            linewidth=1.5,
            label="interrupted twice",
        )
        for start, text in zip(starts, ("SIGTERM", "SIGKILL"), strict=True):
            axes.axvline(start, color="#e65100", linewidth=1, linestyle="--")
            label = f" {text};\n goes on after\n step {start}"
            axes.annotate(
                label, (start, 0.6), xycoords=("data", "axes fraction"), va="top", fontsize=11
            )
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.set_title("byte-level GPT at stage 3, 8 virtual CPU devices")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")


def main() -> None:
    args = training.parse_args(__doc__, HERE / "results")
    with tempfile.TemporaryDirectory() as name:
        whole, broken = Path(name, "whole"), Path(name, "broken")
        run(command(whole, args.steps, args.save_every))
        starts = interrupted(broken, args.steps, args.save_every)
        curves = training.losses(whole), training.losses(broken)
        states = leaves(whole, args.steps), leaves(broken, args.steps)
    different = [name for name, x in states[0].items() if not np.array_equal(x, states[1][name])]
    result: dict[str, Any] = {
        **records.versions("jax", "flax", "optax", "orbax-checkpoint"),
        "steps": args.steps,
        "goes_on_after": starts,
        "losses_that_differ": sum(curves[0][i] != curves[1][i] for i in curves[0]),
        "leaves": len(states[0]),
        "leaves_that_differ": different,
    }
    stem = args.out / result["date"]
    records.write(stem.with_suffix(".json"), result)
    plot(stem.with_suffix(".png"), *curves, starts)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
