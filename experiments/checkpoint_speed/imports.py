"""Imports a tensor that a layout transposes, next to safetensors' own loader and Orbax.

python experiments/checkpoint_speed/imports.py                         # about 5 minutes, 10 GB of memory
python experiments/checkpoint_speed/imports.py --rounds 2 --heads 32768x4096xfloat32

Each case is a process of its own, on one CPU device, that has done the same with a small tensor before.
`load` is `load_file`, a transpose and `device_put`, after which the array is in memory; `load, save` saves it
by Orbax, and syncs its files, after which a checkpoint is on the disk, as after `import`. `import as it is`
does not transpose. The peak is the process's resident memory, less what it was before.
Writes results/<date>-imports.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file

import jzero
from experiments.checkpoint_memory.measure import Peak
from experiments.shared import records
from jzero.checkpoint import _files

HERE = Path(__file__).parent
PACKAGES = ("jax", "jaxlib", "orbax-checkpoint", "tensorstore", "numpy", "safetensors")
HEADS = ("32768x4096xfloat32", "128256x8192xbfloat16")  # 512 MiB, and that of Llama 3 70B
NAME = "lm_head.weight"


def imports(axes: str) -> Callable[[Path, Path], Any]:
    layout = jzero.WeightLayout("head", (jzero.WeightRule(NAME, "lm_head/kernel", axes),))
    return lambda file, out: jzero.import_weights(file, out, layout=layout)


def load(file: Path, out: Path) -> jax.Array:
    return jax.block_until_ready(jax.device_put(load_file(file)[NAME].T))


def load_and_save(file: Path, out: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(out, {"params": {"lm_head": {"kernel": load(file, out)}}})
    _files.sync_tree(out)


CASES = {
    "import": imports("out d -> d out"), "import as it is": imports("out d -> out d"),
    "load": load, "load, save": load_and_save,
}  # fmt: skip


def one_case(who: str, folder: Path) -> dict[str, float]:
    CASES[who](folder / "small.safetensors", folder / f"{who}-small")
    with Peak() as peak:
        start, cpu = time.perf_counter(), time.process_time()
        CASES[who](folder / "in.safetensors", folder / f"{who}")
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    return {"s": seconds, "cpu_s": cpu_seconds, "peak_mib": (peak.most - peak.before) / 2**20}


def one_round(head: str) -> dict[str, dict[str, float]]:
    rows, columns, dtype = head.split("x")
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        rng = np.random.default_rng(0)
        for name, num in (("small", 8), ("in", int(rows))):
            values = rng.standard_normal((num, int(columns)), np.float32).astype(np.dtype(dtype))
            save_file({NAME: values}, Path(folder, f"{name}.safetensors"))
        del values
        found = {}
        for who in CASES:
            command = [sys.executable, __file__, "--case", who, folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found[who] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", default=HEADS, help="rows x columns x dtype")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(one_case(args.case[0], Path(args.case[1]))))
        return
    cases = []
    for head in args.heads:
        rounds = [one_round(head) for _ in range(args.rounds)]
        print(
            f"| {head.replace('x', ' x ')} | s | CPU s | s / import | peak, MiB |\n"
            + "| --- " * 5
            + "|"
        )
        for who in CASES:
            middle = {x: np.median([each[who][x] for each in rounds]) for x in rounds[0][who]}
            ratio = np.median([each[who]["s"] / each["import"]["s"] for each in rounds])
            times = f"{middle['s']:.2f} | {middle['cpu_s']:.2f} | {ratio:.2f}"
            print(f"| {who} | {times} | {middle['peak_mib']:.0f} |", flush=True)
        cases.append({"head": head, "rounds": rounds})
    about = records.environment(*PACKAGES, num_devices=1)
    records.write(
        args.out / f"{about['date']}-imports.json", {"environment": about, "cases": cases}
    )


if __name__ == "__main__":
    main()
