"""Every family of steps in every setting, against one device with the whole batch.

python experiments/exactness/run.py                   # all of it: hours on two cores; goes on where it was
python experiments/exactness/run.py --stages 3 --meshes 8 --dtypes float64 --microbatches 1
python experiments/exactness/run.py --part 1/2        # one half of the families, for a second process

Writes lines of results/<name>.jsonl for each family and setting, and leaves out those that are there with
the same library. `report.py` makes the tables and the picture. Steps are compiled as users compile them, with
all of XLA's and LLVM's optimizations, unlike in the tests.
"""

import argparse
import os
import re
import time
from pathlib import Path

# isort: off
os.environ["JZERO_TEST_OPTIMIZED"] = "1"
import experiments.shared.as_tests  # noqa: F401
import jax
import exactness
from exactness._check import Setting, applies, check
from experiments.shared import records
# isort: on

HERE = Path(__file__).parent

# ---------------------------------------------------------------------------------------------
stages = (3, 2, 1, 0)
meshes = ("8", "4", "2", "1", "2x4")
dtypes = ("float64", "float32")
microbatches = (1, 2)
# ---------------------------------------------------------------------------------------------


def one(name: str, setting: Setting) -> dict[str, object]:
    """The result of a family in a setting, and how long it took."""
    jax.config.update("jax_enable_x64", setting.dtype == "float64")
    start = time.perf_counter()
    try:
        result, found, most = check(name, setting)
    except Exception as error:  # What jzero does not refuse by name is a defect, and is listed.
        result, found, most = "fails", [f"{type(error).__name__}: {error}"], 0.0
    return {
        "result": result,
        "found": [without_paths(text)[:300] for text in found[:3]],
        "largest": float(f"{most:.2g}"),
        "seconds": round(time.perf_counter() - start, 2),
    }


def without_paths(text: str) -> str:
    """The text, with files named from the repository's root or from where packages are installed."""
    return re.sub(r"[^\s(]*/site-packages/", "", text).replace(f"{HERE.parents[1]}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, nargs="+", default=stages)
    parser.add_argument("--meshes", nargs="+", default=meshes)
    parser.add_argument("--dtypes", nargs="+", default=dtypes)
    parser.add_argument("--microbatches", type=int, nargs="+", default=microbatches)
    parser.add_argument("--families", nargs="+", default=exactness.NAMES)
    parser.add_argument("--name", default=f"jax-{jax.__version__}", help="of the file of results")
    parser.add_argument("--part", default="0/1", help="which part of the families: 0/2, 1/2")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    path = args.out / f"{args.name}.jsonl"
    tree, part, parts = records.library(), *map(int, args.part.split("/"))
    made_with = {**records.versions("jax", "jaxlib"), "cpu": records.processor(), "optimized": True}
    lines = records.read_lines(path)
    known = {(x["family"], x["setting"]) for x in lines if x["library"] == tree}
    settings = [
        Setting(stage, tuple(map(int, mesh.split("x"))), dtype, num)
        for num in args.microbatches for mesh in args.meshes for dtype in args.dtypes for stage in args.stages
    ]  # fmt: skip

    for i, name in enumerate(args.families):
        for setting in settings if i % parts == part else ():
            if not applies(exactness.get(name), setting) or (name, str(setting)) in known:
                continue
            about = {"family": name, "setting": str(setting), "library": tree, **made_with}
            records.append(
                path, {**about, "result": "unfinished", "found": []}
            )  # It may end the process.
            done = {**about, **one(name, setting)}
            records.append(path, done)
            if done["result"] not in ("equal", "refused"):
                print(name, setting, done["result"], *done["found"], sep="; ", flush=True)  # type: ignore
        jax.clear_caches()


if __name__ == "__main__":
    main()
