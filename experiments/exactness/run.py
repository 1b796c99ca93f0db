"""Every family of steps in every setting, against one device with the whole batch.

python experiments/exactness/run.py                      # all of it: hours on two cores; goes on where it stopped
python experiments/exactness/run.py --stages 3 --meshes 8 --dtypes float64 --accumulate 1
python experiments/exactness/run.py --shard 1/2          # one half of the families, for a second process

Writes a line of results/<JAX version>.jsonl for each family and setting, and leaves out those that are
there with the same library. `report.py` makes the table.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# The settings of the tests: virtual devices, and threads enough for collectives that wait.
sys.path.insert(0, str(HERE.parents[1] / "tests"))
import conftest  # noqa: E402, F401
import jax  # noqa: E402

import exactness  # noqa: E402
from exactness._check import NOT_IN_MICROBATCHES, Setting, applies, check  # noqa: E402

# ---------------------------------------------------------------------------------------------
stages = (3, 2, 1, 0)
meshes = ("8", "4", "2", "1", "2x4")
dtypes = ("float64", "float32")
accumulate = (1, 2)
# ---------------------------------------------------------------------------------------------


def library() -> str:
    """The commit whose files are tested, with a mark if they are not all committed."""
    root = HERE.parents[1]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()

    tree = git("rev-parse", "--short", "HEAD:jzero")
    return tree + ("+" if git("status", "--porcelain", "jzero") else "")


def one(name: str, setting: Setting) -> dict[str, object]:
    jax.config.update("jax_enable_x64", setting.dtype == "float64")
    start = time.perf_counter()
    try:
        result, found = check(name, setting)
    except Exception as error:  # What jzero does not refuse by name is a defect, and goes on the list.
        result, found = "fails", [f"{type(error).__name__}: {error}"]
    return {"result": result, "found": [text[:300] for text in found[:3]],
            "seconds": round(time.perf_counter() - start, 2)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=stages)
    parser.add_argument("--meshes", nargs="+", default=meshes)
    parser.add_argument("--dtypes", nargs="+", default=dtypes)
    parser.add_argument("--accumulate", type=int, nargs="+", default=accumulate)
    parser.add_argument("--families", nargs="+", default=exactness.NAMES)
    parser.add_argument("--shard", default="0/1", help="which part of the families: 0/2, 1/2")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"jax-{jax.__version__}.jsonl"
    tree, part, parts = library(), *map(int, args.shard.split("/"))
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    known = {(x["family"], x["setting"]) for x in lines if x["library"] == tree}
    settings = [
        Setting(stage, tuple(map(int, mesh.split("x"))), dtype, num)
        for num in args.accumulate for mesh in args.meshes for dtype in args.dtypes for stage in args.stages
    ]  # fmt: skip
    for i, name in enumerate(args.families):
        family = exactness.get(name)
        for setting in settings if i % parts == part else ():
            if not applies(family, setting) or (name, str(setting)) in known:
                continue
            done = {"family": name, "setting": str(setting), **one(name, setting), "library": tree,
                    "date": datetime.date.today().isoformat(), "python": platform.python_version()}  # fmt: skip
            with path.open("a") as file:
                file.write(json.dumps(done) + "\n")
            if done["result"] not in ("equal", "refused"):
                print(name, setting, done["result"], *done["found"], sep="; ", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    assert os.environ.get("JAX_PLATFORMS") == "cpu" and NOT_IN_MICROBATCHES
    main()
