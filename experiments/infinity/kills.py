"""Kills a step with state in files at every operation on a file, and counts what is found then.

python experiments/infinity/kills.py                     # a minute; needs a C compiler
python experiments/infinity/kills.py --show              # the table of the last run

The steps of tests/test_nvme_kills.py: two files of five tiles, which say which tile of which step they are. A
child does a step and is killed before its n-th operation on a file, or in the middle of it (a torn write), or
the operation fails, for every n. Then the files are opened again, and every tile is read. Prints a table in
Markdown, writes <date>-kills.json.
"""

import argparse
import collections
import os
import tempfile
from pathlib import Path

# isort: off
import experiments.shared.as_tests  # noqa: F401
import faults
import nvme_state
import test_nvme_kills as kills
from experiments.shared import records
# isort: on

FAULTS = {
    "killed before it": faults.Fault("kill", kinds=kills.BOTH),
    "killed in the middle": faults.Fault("tear", kinds=kills.BOTH),
    "it fails, a broken disk": faults.Fault("fail", error="EIO", kinds=kills.BOTH),
    "it fails, a full disk": faults.Fault("fail", error="ENOSPC", kinds=kills.BOTH),
}
BEFORE, AFTER, LOST, MIXED = "step before", "step after", "refused, by name", "anything else"


def found(root: Path, in_place: bool) -> str:
    """What a run finds in the files that a fault has left."""
    if kills.is_dirty(root, in_place):
        return LOST
    try:
        with nvme_state.reopen(root, in_place) as files:
            nvme_state.check(files)
            steps = {kills.STEP: BEFORE, kills.STEP + 1: AFTER}
            return steps.get(nvme_state.step_of(files), MIXED)
    except Exception:
        return MIXED


def counted(
    children: faults.Children, folder: Path, fault: faults.Fault, in_place: bool
) -> collections.Counter[str]:
    """One fault at each operation of a step."""
    folder.mkdir()
    log = kills.operations(children, folder, in_place=in_place)
    counts: collections.Counter[str] = collections.Counter()
    for at in range(1, kills.num_of_one_step(log, in_place) + 1):
        root = folder / str(at)
        with nvme_state.made(root, in_place):
            pass
        script = "nvme_state:step_in_child"
        ended = children.run(script, root=str(root), in_place=in_place, fault=fault._replace(at=at))
        if fault.kills:
            counts[found(root, in_place)] += 1
        # What fails is tried again by the child, which says what it has found.
        elif ended.said[0]["error"] != "StateError":
            counts[MIXED] += 1
        else:
            counts[BEFORE if ended.said[1] == {"step": kills.STEP + 1} else LOST] += 1
    return counts


def table(rows: list[dict[str, object]]) -> str:
    names = ["slots", "at every operation", "operations", BEFORE, AFTER, LOST, MIXED]
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.show:
        print(table(records.latest(args.out, "kills")["rows"]))
        return
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as place, faults.Children(["nvme_state"]) as children:
        for in_place in (False, True):
            for name, fault in FAULTS.items():
                folder = Path(place) / f"{name}-{in_place}"
                counts = counted(children, folder, fault, in_place)
                results = {each: counts[each] for each in (BEFORE, AFTER, LOST, MIXED)}
                slots = "one (in_place)" if in_place else "two"
                rows.append(
                    {"slots": slots, "at every operation": name, "operations": counts.total()}
                    | results
                )
    print(table(rows))
    result = {**records.versions("jax", "numpy"), "jzero files": records.library(), "rows": rows}
    path = args.out / f"{result['date']}-kills.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
