"""Saves, exports, imports and restores that a fault meets, and what they promise whatever it is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.numpy import load_file

from jzero.checkpoint._bucket import Bucket

from ._children import Children, Ended
from ._library import CHANGES, READS, WRITES, Fault, Operation, read_log
from ._requests import Request, RequestFault
from ._scripts import EXPORTS, IMPORTED, KEPT, STEPS, values

Root = pathlib.Path | str  # A folder, or a directory of a bucket.
SAVED, SAVES = (1, 2), (3, 4)  # steps that are there before, and those that are saved
TARGET = "model.safetensors"
# What must not go unnoticed: the kernel may forget the data, and says so once.
_TO_DISK = (*WRITES, "fsync", "fdatasync")
# How operations fail on disks that break, are full, or belong to somebody else, and over a network.
_CHANGE_ERRORS, _READ_ERRORS = ("EIO", "ENOSPC", "EACCES", "EDQUOT"), ("EIO", "EACCES", "ESTALE")


class Outcome(NamedTuple):
    """What a fault led to.

    Attributes:
      operation: what it met; None if the script ended before.
      noticed: how it was told: "killed", "raised", "silent".
      broken: the promises that were not kept; none is as it should be.
    """

    fault: Fault | RequestFault
    operation: Operation | Request | None
    noticed: str
    broken: list[str]

    def __str__(self) -> str:
        name, path = (self.operation.name, self.operation.target) if self.operation else ("", "")
        lines = [f"{self.fault}, {name} {path}: {self.noticed}", *self.broken]
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A script that meets faults.

    Attributes:
      script: the name of a function of `_scripts`, with its arguments.
      prepare: makes what is there before, in a new directory.
      judge: the promises that were broken, once it has ended.
    """

    name: str
    script: str
    arguments: dict[str, Any]
    prepare: Callable[[Children, Root], None]
    judge: Callable[[Run], list[str]]

    def operations(self, children: Children, folder: pathlib.Path) -> list[Operation]:
        """Those of the script when nothing fails; checks that all promises are kept then."""
        run = Run(self, children, folder, Fault(kinds=CHANGES | READS))
        assert run.ended.status == 0, run.ended
        assert not (broken := run.broken()), broken
        return run.log

    def faults(self, operations: Sequence[Operation]) -> list[Fault]:
        """Every fault at every operation: a change may be the last, or half done; each may fail."""
        found = []
        operations = [operation for operation in operations if operation.number]
        changes = [operation for operation in operations if not operation.reads]
        for at, operation in enumerate(changes, 1):
            found += [Fault(action, at) for action in _actions(operation)]
            found.append(Fault("fail_from", at, "ENOSPC"))
        for at, operation in enumerate(operations, 1):
            errors = _READ_ERRORS if operation.reads else _CHANGE_ERRORS
            found.append(Fault("fail", at, errors[at % len(errors)], CHANGES | READS))
        return found

    def meet(self, children: Children, folder: pathlib.Path, fault: Fault) -> Outcome:
        """Runs the script in a new directory below `folder`, with a fault."""
        run = Run(self, children, folder, fault)
        try:
            return Outcome(fault, run.hit, run.noticed, run.broken())
        finally:
            run.remove()


def _actions(operation: Operation) -> list[str]:
    """What else than failing can become of a change."""
    return ["kill", "tear", "shorten"] if operation.name in WRITES else ["kill"]


class Run:
    """A script that has run to its end, whatever that was."""

    def __init__(self, scenario: Scenario, children: Children, folder: pathlib.Path, fault: Fault):
        self.scenario, self.children, self.fault = scenario, children, fault
        self.root, self._log = folder.resolve() / "root", folder / "log"
        template = folder / f"before {scenario.name}"
        if not template.exists():
            template.mkdir(parents=True)
            scenario.prepare(children, template)
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(template, self.root)
        self.ended = self.run(
            scenario.script, fault=fault, log=str(self._log), **scenario.arguments
        )
        self.log = read_log(self._log)

    @property
    def hit(self) -> Operation | None:
        """The operation that met the fault."""
        found = (op for op in self.log if op.number and op.number == self.fault.at)
        return next(found, None)

    @property
    def noticed(self) -> str:
        if self.ended.status == -9:
            return "killed"
        told = any("failed" in said or said.get("exit", 0) != 0 for said in self.ended.said)
        return "raised" if told else "silent"

    def run(self, script: str, **arguments: Any) -> Ended:
        return self.children.run(f"faults._scripts:{script}", root=str(self.root), **arguments)

    def said(self, key: str) -> list[Any]:
        return [said[key] for said in self.ended.said if key in said]

    def folder(self, name: str) -> pathlib.Path:
        """What is below the root, as files."""
        return self.root / name

    def names(self) -> set[str]:
        """What is in the root."""
        return {path.name for path in self.root.iterdir()}

    def can_clean_up(self) -> bool:
        """Whether what was half done could be removed: nothing fails in that."""
        removes = self.hit is not None and self.hit.name in ("unlink", "rmdir", "open", "opendir")
        if self.fault.action == "fail":
            return not removes
        return self.fault.action in ("count", "shorten")

    def broken(self) -> list[str]:
        """The promises of every script that are not kept, and those of this one."""
        hit, status = self.hit, self.ended.status
        if status is None:
            return [f"it hung: {self.ended.errors}"]
        found = []
        if status != (-9 if self.fault.kills and hit else 0):
            found.append(f"it ended with {status}: {self.ended.errors}")
        fails = self.fault.action in ("fail", "fail_from")
        if fails and hit and hit.name in _TO_DISK and self.noticed == "silent":
            found.append(f"a failed {hit.name} of {hit.path} was not told")
        return found + self.scenario.judge(self)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


# ---------------------------------------------------------------------------------------- saves


def _prepare_steps(children: Children, root: Root) -> None:
    ended = children.run("faults._scripts:save", root=str(root), steps=SAVED)
    assert ended.status == 0, ended
    assert [said.get("complete") for said in ended.said] == list(SAVED), ended


def _judge_save(run: Run) -> list[str]:
    broken, complete = _judge_errors(run), run.said("complete")
    if not run.fault.kills and complete != list(SAVES):
        broken.append(f"without the fault only {complete} were complete")
    return broken + judge_steps(run.children, run.root, max([*SAVED, *complete]))


def judge_steps(children: Children, root: Root, complete: int) -> list[str]:
    """What was acknowledged is there, all that is there is right, and a training goes on."""
    ended = children.run("faults._scripts:look", root=str(root))
    if ended.status != 0:
        return [f"no new training: {ended.status}, {ended.errors}"]
    broken = []
    found, *went_on, after = ended.said
    latest, steps = found["latest"], {int(step): told for step, told in found["steps"].items()}
    if latest is None or latest < complete:
        broken.append(f"step {complete} was complete, and the latest is {latest}")
    broken += [f"step {step} is there: {told}" for step, told in steps.items() if told != "right"]
    kept = range(latest - KEPT + 1, latest + 1) if latest else ()
    broken += [f"step {step} is not there any more" for step in kept if step not in steps]
    broken += [f"a new training's step: {said}" for said in went_on if said != {"went on": "right"}]
    left = set(after["names"]) - set(after["expected"])
    return broken + [f"left behind: {name}" for name in sorted(left) if _is_leftover(name)]


def _is_leftover(name: str) -> bool:
    """Whether it is a step, or a part of one."""
    return any(character.isdigit() for character in name)


def _judge_errors(run: Run) -> list[str]:
    """Errors are CheckpointErrors, and gone when the fault is."""
    told = [] if run.fault.kills else run.ended.said
    wrong = [said for said in told if said.get("ours") is False]
    again = [said for said in told if "failed again" in said]
    return [f"not a CheckpointError: {said['error']}" for said in wrong] + [
        f"without the fault: {said['failed again']}: {said['error']}" for said in again
    ]


# --------------------------------------------------------------------------------------- restores


def _judge_restore(run: Run) -> list[str]:
    """An error or the right values; and the right values when the fault is gone."""
    broken = _judge_errors(run)
    broken += [f"restored: {said}" for said in run.said("restored") if said != "right"]
    broken += [f"the latest step is {said}" for said in run.said("latest") if said != SAVED[-1]]
    if run.fault.kills:
        again = run.run("restore", step=SAVED[-1])
        restored = [said["restored"] for said in again.said if "restored" in said]
        return broken + [f"after it: {again}"] * (restored != ["right"] * 2)
    if run.said("restored").count("right") != 2:
        broken.append(f"restored {run.said('restored')}")
    return broken


# ---------------------------------------------------------------------------------------- exports

# What one file becomes, or several: flags by how the older and the newer export are to be.
_WHOLE: list[str] = []
_PARTS = ["--max-file-size", "600B"]


def _export(step: int, flags: Sequence[str]) -> list[str]:
    return ["export", f"{STEPS}/{step}", f"{EXPORTS}/{TARGET}", "--overwrite", *flags]


def _prepare_export(flags: Sequence[str]) -> Callable[[Children, Root], None]:
    def prepare(children: Children, root: Root) -> None:
        _prepare_steps(children, root)
        if isinstance(root, pathlib.Path):
            (root / EXPORTS).mkdir()
        _run_command(children, root, _export(SAVED[0], flags))

    return prepare


def _run_command(children: Children, root: Root, words: Sequence[str]) -> None:
    ended = children.run("faults._scripts:command", root=str(root), words=words)
    assert ended.said == [{"exit": 0}], ended


def _judge_export(run: Run) -> list[str]:
    """The older or the newer export, whole; nothing else after an error, or after another export."""
    folder, broken = run.folder(EXPORTS), _judge_exit(run)
    found = _exported(folder)
    if not found or set(found) - set(SAVED):
        broken.append(f"there are {found}, of {sorted(path.name for path in folder.iterdir())}")
    if run.said("exit") == [0] and found != [SAVED[1]]:
        broken.append(f"it was done, and there are {found}")
    told = any("the older export cannot be removed" in str(said) for said in run.ended.said)
    if run.can_clean_up() and not told:
        broken += _leftovers(folder, "the error")
    again = run.run("command", words=run.scenario.arguments["words"])
    folder = run.folder(EXPORTS)
    if again.said != [{"exit": 0}] or _exported(folder) != [SAVED[1]]:
        broken.append(f"another export to the same name: {again.said}, {_exported(folder)}")
    return broken + _leftovers(folder, "another export")


def _leftovers(folder: pathlib.Path, after: str) -> list[str]:
    """What belongs to no export: neither named by one nor its index."""
    names = {path.name for path in folder.iterdir()}
    index = folder / f"{TARGET}.index.json"
    known = {TARGET, index.name}
    if index.exists():
        known |= set(json.loads(index.read_text())["weight_map"].values())
    return [f"left behind after {after}: {name}" for name in sorted(names - known)]


def _judge_exit(run: Run) -> list[str]:
    """A command that fails says why, as an error of ours."""
    wrong = [f"not a CheckpointError: {said['error']}" for said in run.ended.said
             if "error" in said and said["exit"] != 1]  # fmt: skip
    return [] if run.fault.kills else wrong


def _exported(folder: pathlib.Path) -> list[Any]:
    """The step whose parameters each export is, or what is wrong with it: of the file, and of the index."""
    found = []
    if (folder / TARGET).exists():
        found.append(_step_of(lambda: load_file(folder / TARGET)))
    index = folder / f"{TARGET}.index.json"
    if index.exists():
        found.append(_step_of(lambda: _load_indexed(index)))
    return found


def _step_of(load: Callable[[], dict[str, Any]]) -> Any:
    try:
        tensors = load()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    for step in SAVED:
        if _same(tensors, values(step)["params"]):
            return step
    return "a mixture"


def _same(tensors: dict[str, Any], expected: dict[str, Any]) -> bool:
    return tensors.keys() == expected.keys() and all(
        tensors[name].tobytes() == expected[name].tobytes() for name in expected
    )


def _load_indexed(index: pathlib.Path) -> dict[str, Any]:
    """The tensors, each from the file that the index names; none may be left over."""
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(index.parent / name) for name in set(weight_map.values())}
    if sum(map(len, files.values())) != len(weight_map):
        raise ValueError("the files have tensors that the index does not name")
    return {name: files[file][name] for name, file in weight_map.items()}


# ---------------------------------------------------------------------------------------- imports


def _prepare_import(children: Children, root: Root) -> None:
    _prepare_export(_PARTS)(children, root)
    if isinstance(root, pathlib.Path):
        return shutil.rmtree(root / STEPS)
    bucket = Bucket.of("test", f"{root}/{STEPS}")
    assert bucket is not None
    bucket.remove(bucket.names())


_IMPORT = ["import", f"{EXPORTS}/{TARGET}.index.json", IMPORTED]


def _judge_import(run: Run) -> list[str]:
    """The checkpoint is there and right, or it is not there, and another import makes it."""
    broken, (found,) = _judge_exit(run), _imported(run)
    if found not in ("right", "absent"):
        broken.append(f"it is there: {found}")
    if run.said("exit") == [0] and found != "right":
        broken.append(f"it was done, and is {found}")
    known = {EXPORTS, IMPORTED}
    if run.can_clean_up():
        broken += _others(run, known, "the error")
    again = run.run("command", words=_IMPORT)
    if (again.said == [{"exit": 0}]) != (found == "absent") or _imported(run) != ["right"]:
        broken.append(f"another import to the same name: {again.said}, {_imported(run)}")
    return broken + _others(run, known, "another import")


def _imported(run: Run) -> list[str]:
    ended = run.run("look_at_import", step=SAVED[0])
    return [said["imported"] for said in ended.said] or [ended.errors]


def _others(run: Run, known: set[str], after: str) -> list[str]:
    return [f"left behind after {after}: {name}" for name in sorted(run.names() - known)]


# ------------------------------------------------------------------------------------------- all


def _of_exports() -> list[Scenario]:
    shapes = {"a file": _WHOLE, "files": _PARTS}
    return [
        Scenario(
            f"export {new} over {old}", "command", {"words": _export(SAVED[1], shapes[new])},
            _prepare_export(shapes[old]), _judge_export,
        )
        for old in shapes for new in shapes
    ]  # fmt: skip


def _of_saves() -> list[Scenario]:
    return [
        Scenario(
            f"save, {'in the background' if asynchronous else 'and wait'}", "save",
            {"steps": SAVES, "asynchronous": asynchronous}, _prepare_steps, _judge_save,
        )
        for asynchronous in (True, False)
    ]  # fmt: skip


SCENARIOS = {
    scenario.name: scenario
    for scenario in [
        *_of_saves(),
        Scenario("restore", "restore", {"step": SAVED[-1]}, _prepare_steps, _judge_restore),
        *_of_exports(),
        Scenario("import", "command", {"words": _IMPORT}, _prepare_import, _judge_import),
    ]
}  # fmt: skip
