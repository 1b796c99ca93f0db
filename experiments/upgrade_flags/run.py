"""What JAX's upgrade flags change of the families of tests/zoo: collectives, refusals, training.

python experiments/upgrade_flags/run.py          # describes all families; nothing runs; a quarter of an hour
python experiments/upgrade_flags/run.py --train  # trains those whose program changes, with all four flags

Needs a JAX that has the flags (`.venv-newest`). Each is set on its own, then all of them. Writes
results/<date>.json and prints the tables.
"""

import argparse
import collections
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

# isort: off
import experiments.shared.as_tests  # noqa: F401
import jax
import jax.numpy as jnp
import zoo
from zoo import Setting, applies, check, configured, sharded
from experiments.shared import records
import samples
import jzero
# isort: on

HERE = Path(__file__).parent
ALONE = {name.removeprefix("jax_"): (name,) for name in samples.UPGRADE_FLAGS}
FLAGS = {**ALONE, "all four": samples.UPGRADE_FLAGS}
Rows = dict[str, float]


def equations(name: str) -> str:
    """The step as JAX traces it, before jzero sees it, without addresses of functions."""
    family = zoo.get(name)
    dtype = jnp.dtype("float32")
    with configured(family):
        args = family.init(dtype), *family.batches(1, dtype)[0]
        return re.sub(
            r" at 0x[0-9a-f]+", "", str(jax.make_jaxpr(family.reference or family.step)(*args))
        )


def described(name: str, setting: Setting) -> Rows | str:
    """Bytes of each collective and movement of rows, by kind and leaf; or the text that refuses the step."""
    family = zoo.get(name)
    dtype = jnp.dtype(setting.dtype)
    found: Rows = collections.defaultdict(float)
    with configured(family):
        try:
            report = sharded(family, setting).describe(
                family.init(dtype), *family.batches(1, dtype)[0]
            )
        except jzero.JzeroError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
    for each in report.traffic:
        kind = f"{each.op} {each.dtype} of {each.leaf or 'rows and sums'}"
        found[kind] += each.itemsize * each.total_elements
    for move in report.movements:
        found[f"rows moved by {move.operation}"] += move.nbytes * move.times
    return dict(found)


def compared(before: Rows | str, after: Rows | str) -> dict[str, Any]:
    """What a flag changes; empty if nothing."""
    if isinstance(before, str) and isinstance(after, str):
        return {}
    if isinstance(after, str) or isinstance(before, str):
        return {
            "refused": after if isinstance(after, str) else None,
            "was refused": isinstance(before, str),
        }
    grown = {k: after.get(k, 0) - before.get(k, 0) for k in {**before, **after}}
    parts = {
        "added": {k: x for k, x in grown.items() if x > 0},
        "saved": {k: -x for k, x in grown.items() if x < 0},
    }
    return {name: part for name, part in parts.items() if part}


def describe_all(names: list[str], settings: list[Setting]) -> list[dict[str, Any]]:
    """For each family, setting and flag, what it changes."""
    lines = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        plain = equations(name)
        changing = {}
        for flag, on in FLAGS.items():
            with samples.switched_on(*on):
                if equations(name) != plain:
                    changing[flag] = on
        for setting in settings if changing else ():
            if not applies(zoo.get(name), setting):
                continue
            before = described(name, setting)
            for flag, on in changing.items():
                with samples.switched_on(*on):
                    try:
                        change = compared(before, described(name, setting))
                    except Exception as error:
                        change = {"fails": "".join(traceback.format_exception_only(error))[:300]}
                lines.append({"family": name, "setting": str(setting), "flag": flag, **change})
                if change:
                    print(lines[-1], flush=True)
        jax.clear_caches()
    return lines


def train_all(names: list[str], setting: Setting) -> list[dict[str, Any]]:
    """Families trained with all flags on, sharded and on one device."""
    lines = []
    jax.config.update("jax_enable_x64", setting.dtype == "float64")
    for name in names:
        if not applies(zoo.get(name), setting):
            continue
        with samples.switched_on(*samples.UPGRADE_FLAGS):
            try:
                result, found, most = check(name, setting)
            except Exception as error:
                result, found, most = "fails", [f"{type(error).__name__}: {error}"[:300]], 0.0
        lines.append({"family": name, "setting": str(setting), "result": result, "largest": most})
        if result != "equal":
            print(name, setting, result, *found[:2], flush=True)
        jax.clear_caches()
    return lines


def tables(results: dict[str, Any]) -> None:
    """A row for each flag; then one for each family that it changes anything of."""
    print(
        "| flag | programs that JAX writes otherwise | with more bytes | with fewer | refused | fail |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for flag in FLAGS:
        lines = [x for x in results["described"] if x["flag"] == flag]
        counts = [
            sum(bool(x.get(key)) for x in lines) for key in ("added", "saved", "refused", "fails")
        ]
        print(f"| `{flag}` | {len(lines)} | {' | '.join(map(str, counts))} |")
    changed = [x for x in results["described"] if x.keys() - {"family", "setting", "flag"}]
    for line in changed:
        print("|", " | ".join(str(x)[:300] for x in line.values()), "|")
    trained = collections.Counter(x["result"] for x in results.get("trained", ()))
    print("trained with all four:", dict(trained))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--families", nargs="+", default=zoo.NAMES)
    parser.add_argument("--microbatches", type=int, nargs="+", default=(1, 2))
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    about = {**records.versions("jax", "jaxlib", "flax", "optax"), "library": records.library()}
    path = args.out / f"{about['date']}.json"
    if args.train:
        results = json.loads(path.read_text())
        names = list(dict.fromkeys(x["family"] for x in results["described"]))
        results["trained"] = train_all([x for x in names if x in args.families], Setting())
    else:
        settings = [Setting(dtype="float32", accumulate=num) for num in args.microbatches]
        results = {**about, "described": describe_all(args.families, settings)}
    path.write_text(json.dumps(results, indent=1) + "\n")
    tables(results)


if __name__ == "__main__":
    main()
