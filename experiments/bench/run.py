"""Measures what a training by jzero costs in speed and memory on the devices that are here.

python experiments/bench/run.py                                        # under 5 minutes
python experiments/bench/run.py --seconds 2 --out /tmp/bench           # less exact

Tokens per second and memory of plain jax.jit on one device, of stages 1 and 3 on all, and with optimizer
state on the host, as a table, <date>-<devices>.json and a picture beside it. Without an accelerator it runs
on 8 virtual CPU devices, whose speed says nothing.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

# Where jzero is installed without this repository, `experiments` is on no path.
sys.path.append(str(Path(__file__).parents[2]))
from experiments.shared import records

HERE = Path(__file__).parent
WAYS = ("jax.jit", "stage 1", "stage 3", "PinnedHost", "HostCPU")
LIMIT = 120  # seconds for one way: what it takes to compile is in it
HEADER = ("", "devices", "tokens/s", "each", "MFU", "1st step", "rests", "on host", "peak")


def measure(way: str, seconds: float) -> dict[str, Any]:
    """What a process that trains this way found, or how it failed."""
    command = [sys.executable, str(HERE / "worker.py"), way, str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return {"way": way, "error": f"not done after {LIMIT} s"}
    if done.returncode:
        return {"way": way, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def in_bytes(count: int | None) -> str:
    """In binary units, short: '1.2G'."""
    if count is None:
        return "-"
    for unit in ("", "K", "M"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.3g}G"


def row(found: dict[str, Any]) -> tuple[str, ...]:
    if "error" in found:
        return (found["way"], "failed", *["-"] * (len(HEADER) - 2))
    mfu, rest = found["mfu"], found["at_rest_bytes"]
    return (
        found["way"],
        str(found["num_devices"]),
        f"{found['tokens_per_second']:,.0f}",
        f"{found['tokens_per_second'] / found['num_devices']:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}",
        f"{found['first_step_seconds']:.1f} s",
        in_bytes(rest["device"]),
        in_bytes(rest["host"]) if rest["host"] else "-",
        in_bytes(found["peak_bytes"]),
    )


def table(results: list[dict[str, Any]]) -> list[str]:
    """Within 80 columns, with what it holds for."""
    cells = [HEADER, *map(row, results)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in pairs]).rstrip()
        for pairs in (enumerate(zip(line, widths, strict=True)) for line in cells)
    ]
    failed = [f"{found['way']}: {found['error']:.60}" for found in results if "error" in found]
    return [*lines, "", *failed, *conditions(results)]


def conditions(results: list[dict[str, Any]]) -> list[str]:
    done = [found for found in results if "error" not in found]
    if not done:
        return []
    first, last = done[0], done[-1]
    model, env = first["model"], last["environment"]
    lines = [
        f"{model['parameters'] / 1e6:.1f}M parameters in {model['layers']} layers, compute in "
        f"{model['compute']}, AdamW;",
        f"{model['rows_per_device']} x {model['context']} tokens on each device and step.",
        f"{env['date']}: {env['devices']}, {env['cpu'][:50]},",
        f"JAX {env['jax']}, jzero {env['jzero files']}.",
        "Each: per device. Memory is each device's: what rests there of the state, and on",
        f"its host; peak: {first['peak_bytes_by']}.",
    ]
    if first["platform"] == "cpu":
        lines += [
            "These devices are virtual and share the processors: the speeds compare nothing.",
            "What rests where is what as many real devices would hold; a peak is XLA:CPU's.",
        ]
    return lines


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second on each device, and what each device holds."""
    from experiments.shared import pictures

    done = [found for found in results if "error" not in found]
    names = [found["way"] for found in done]
    virtual = done[0]["platform"] == "cpu"
    title = "tokens/s per device" + " (virtual: says nothing)" * virtual
    with pictures.drawn(path, 1, 2, font=10, figsize=(10, 3.6)) as (_, (left, right)):
        speeds = [found["tokens_per_second"] / found["num_devices"] for found in done]
        left.bar(names, speeds, color="tab:gray" if virtual else "tab:blue", alpha=0.6)
        left.set(title=title)
        peaks = [(found["peak_bytes"] or 0) / 2**20 for found in done]
        right.bar(names, peaks, color="tab:blue", alpha=0.6, label="peak")
        rests = [found["at_rest_bytes"]["device"] / 2**20 for found in done]
        right.plot(names, rests, "k_", markersize=30, label="at rest")
        for at, found in enumerate(done):
            if found["peak_bytes"] is None:
                right.text(at, 0, "peak not\ncounted\n", ha="center", va="bottom", fontsize=8)
        right.set(title="MiB on each device")
        right.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15, help="of timed steps, of each way")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    results = []
    for way in args.ways:
        print(f"{way} ...", file=sys.stderr, flush=True)
        results.append(measure(way, args.seconds))
        if "environment" in results[-1]:
            results[-1]["environment"]["jzero files"] = records.library()
    print("\n".join(table(results)))
    done = [found for found in results if "error" not in found]
    if not done:
        sys.exit("no way to train came to its end")
    env = done[-1]["environment"]
    kind = re.sub(r"[^a-z0-9]+", "-", env["devices"].lower()).strip("-")
    path = args.out / f"{env['date']}-{kind}.json"
    records.write(path, results)
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
