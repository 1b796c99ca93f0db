"""Every fault at every operation on a file, of saves, exports, imports and restores; and power cuts.

python experiments/checkpoint_faults/run.py                  # all of it; goes on where it stopped
python experiments/checkpoint_faults/run.py --in s3          # at every request to a bucket; also gs
python experiments/checkpoint_faults/run.py --count          # how many faults there are
python experiments/checkpoint_faults/run.py --every 10       # each tenth

Writes a line of out/<library>-<where>.jsonl for each fault, leaves out those that are there, and then sums
them up in results/<date>-<where>.json.
"""

import argparse
import collections
import contextlib
import functools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# isort: off
import experiments.shared.as_tests  # noqa: F401
import faults
from experiments.shared import records
from faults._disk import disk_with_steps, steps_after_cut, why_no_disk
# isort: on

HERE = Path(__file__).parent
CUTS = "power cut"  # what is not a scenario of its own
KILLS = ("kill", "kill_after", "tear")
PACKAGES = ("jax", "orbax-checkpoint", "tensorstore")


class Trial(NamedTuple):
    """A fault that is yet to be met."""

    scenario: str
    fault: faults.Fault | faults.RequestFault
    meet: Callable[[], dict[str, Any]]

    @property
    def key(self) -> str:
        return f"{self.scenario}: {self.fault}"


@contextlib.contextmanager
def trials(where: str) -> Iterator[Iterator[Trial]]:
    """Of a file system, or of a bucket."""
    if where == "files":
        if reason := faults.why_not():
            sys.exit(reason)
        with (
            tempfile.TemporaryDirectory() as folder,
            faults.Children(["faults._scripts"]) as children,
        ):
            yield of_files(children, Path(folder))
    else:
        with faults.place(where) as place:
            yield of_bucket(place)


def of_files(children: faults.Children, folder: Path) -> Iterator[Trial]:
    for name, scenario in faults.SCENARIOS.items():
        operations = scenario.operations(children, folder)
        for fault in scenario.faults(operations):
            meet = functools.partial(scenario.meet, children, folder, fault)
            yield Trial(name, fault, functools.partial(tell, meet))
    yield from cuts(children, folder)


def of_bucket(place: faults.Place) -> Iterator[Trial]:
    for name, scenario in faults.BUCKET_SCENARIOS.items():
        for fault in faults.faults_at(place.requests(scenario)):
            meet = functools.partial(place.meet, scenario, fault)
            yield Trial(name, fault, functools.partial(tell, meet))


def tell(meet: Callable[[], faults.Outcome]) -> dict[str, Any]:
    return told(meet())


def told(outcome: faults.Outcome) -> dict[str, Any]:
    found = {"noticed": outcome.noticed, "broken": outcome.broken}
    if outcome.operation is None:
        return {**found, "operation": None}
    return {**found, "operation": outcome.operation.name, "path": outcome.operation.target}


def cuts(children: faults.Children, folder: Path) -> Iterator[Trial]:
    """A power cut at every change of a save."""
    if reason := why_no_disk():
        return print(f"no power cuts: {reason}")
    save = faults.SCENARIOS["save, in the background"]
    changes = [op for op in save.operations(children, folder) if op.number and not op.reads]
    disk = disk_with_steps(children, save, folder)
    for at, operation in enumerate(changes, 1):
        fault = faults.Fault("kill", at)

        def meet(fault: faults.Fault = fault, name: str = operation.name) -> dict[str, Any]:
            broken = steps_after_cut(children, save, disk, folder, fault)
            return {"noticed": "cut", "broken": broken, "operation": name}

        yield Trial(CUTS, fault, meet)


def summed_up(lines: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Counts by scenario and by operation, and every promise that was broken."""
    by_scenario: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    by_operation: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for line in lines:
        outcome = "broken" if line["broken"] else line["noticed"]
        by_scenario[line["scenario"]][f"{line['fault'][0]}: {outcome}"] += 1
        by_operation[line["operation"] or "not reached"][f"{line['fault'][0]}: {outcome}"] += 1
    actions = collections.Counter(line["fault"][0] for line in lines if line["operation"])
    return {
        **records.versions(*PACKAGES),
        "library": records.library(),
        "seconds": round(seconds),
        "kills": sum(actions[action] for action in KILLS),
        "errors": sum(actions.values()) - sum(actions[each] for each in (*KILLS, "shorten")),
        "short writes": actions["shorten"],
        "broken": sum(bool(line["broken"]) for line in lines),
        "by scenario": {name: dict(sorted(counts.items())) for name, counts in by_scenario.items()},
        "by operation": {name: dict(sorted(by_operation[name].items())) for name in sorted(by_operation)},
        "broken promises": [line for line in lines if line["broken"]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="each n-th fault only")
    parser.add_argument("--in", dest="where", choices=("files", "s3", "gs"), default="files")
    parser.add_argument("--only", help="scenarios that begin so")
    parser.add_argument("--count", action="store_true", help="say how many there are, and end")
    args = parser.parse_args()
    faults._children.PATIENCE_SECONDS = 30  # A child needs less than one.
    out = HERE / "out" / f"{records.library()}-{args.where}.jsonl"
    out.parent.mkdir(exist_ok=True)
    start, done = time.monotonic(), {line["key"] for line in records.read_lines(out)}
    with trials(args.where) as found, out.open("a") as file:
        every = [each for each in found if each.scenario.startswith(args.only or "")][:: args.every]
        if args.count:
            return print(collections.Counter(f"{t.scenario}: {t.fault.action}" for t in every))
        for i, trial in enumerate(trial for trial in every if trial.key not in done):
            line = {
                "key": trial.key,
                "scenario": trial.scenario,
                "fault": trial.fault,
                **trial.meet(),
            }
            print(json.dumps(line), file=file, flush=True)
            if line["broken"] or i % 50 == 0:
                seconds = time.monotonic() - start
                print(
                    f"{i} of {len(every) - len(done)}, {seconds:.0f} s, {trial.key}: {line['broken']}"
                )
    result = summed_up(records.read_lines(out), time.monotonic() - start)
    path = HERE / "results" / f"{result['date']}-{args.where}.json"
    records.write(path, result)
    print(
        f"{path}: {result['kills']} kills, {result['errors']} errors, {result['broken']} broke a promise"
    )


if __name__ == "__main__":
    main()
