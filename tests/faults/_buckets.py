# SPDX-License-Identifier: Apache-2.0
"""The same scripts in a bucket: what they promise when a request fails, or is the last."""

from __future__ import annotations

import contextlib
import pathlib
import re
import secrets
import tempfile
from collections.abc import Iterator

import pytest

import gs_server
import jzero
import s3_server
from jzero.checkpoint import _lock
from jzero.checkpoint._bucket import Bucket

from . import _scripts
from ._children import Children
from ._requests import PROXY, Proxy, Request, RequestFault
from ._scenarios import SAVES, SCENARIOS, Outcome, Run, Scenario

BUCKET_SCENARIOS = {
    name: SCENARIOS[name]
    for name in ("save, in the background", "restore", "export files over files", "import")
}


class Place:
    """Where scripts run: children, and a proxy before the server of a bucket.

    Attributes:
      url: a directory of the bucket that nobody else has.
    """

    def __init__(self, children: Children, proxy: Proxy, url: str):
        self.children, self.proxy, self.url = children, proxy, url
        self._prepared: dict[str, str] = {}

    def requests(self, scenario: Scenario) -> list[Request]:
        """Those of the script when nothing fails; checks that all promises are kept then."""
        run = self._run(scenario, RequestFault())
        assert run.ended.status == 0, run.ended
        broken = run.broken()
        run.remove()
        assert not broken, broken
        return sorted(run.requests)

    def meet(self, scenario: Scenario, fault: RequestFault) -> Outcome:
        """Runs the script in a new directory, with a fault."""
        run = self._run(scenario, fault)
        try:
            return Outcome(fault, run.hit, run.noticed, run.broken())
        finally:
            run.remove()

    def prepared(self, scenario: Scenario) -> str:
        """A new directory with what is there before a script."""
        if scenario.name not in self._prepared:
            self._prepared[scenario.name] = self._new()
            scenario.prepare(self.children, self._prepared[scenario.name])
        return _copied(self._prepared[scenario.name], self._new())

    def _run(self, scenario: Scenario, fault: RequestFault) -> BucketRun:
        return BucketRun(scenario, self, self.prepared(scenario), fault)

    def _new(self) -> str:
        return f"{self.url}/{secrets.token_hex(4)}"


LEASE = 0.8  # seconds, where a writer stands still for longer


def stopped_beyond_its_lease(
    place: Place, fault: RequestFault, *, begun: bool = False
) -> list[str]:
    """A writer stands still at a request while another takes over, saves and prunes; promises broken then.

    When it goes on, it changes nothing that the other has written, calls nothing complete, and says why.
    If `begun`, a third one had died before that while it wrote the step that both of them save.
    """
    train_step = _scripts.new_train_step()
    url = begun_step(place) if begun else place.prepared(SCENARIOS["save, in the background"])
    place.proxy.arm(fault)
    child = place.children.start("faults._scripts:save", root=url, steps=SAVES, lease=LEASE)
    place.proxy.client = child.pid
    with another_machine():
        if not place.proxy.stopped.wait(20):
            return [f"it never came to {fault}: {child.wait()}"]
        try:
            with jzero.Checkpointer(f"{url}/{_scripts.STEPS}", train_step, max_to_keep=2) as new:
                latest = new.latest_step() or 0
                steps = [latest + 1, latest + 2]
                for step in steps:
                    new.save(step, train_step.shard(_scripts.values(step)))
                    new.wait()
                before = _objects(url)
                place.proxy.let_go_on()
                ended = child.wait()
                broken = [f"changed: {name}" for name in _changed(before, _objects(url))]
                broken += [f"there are {new.steps()}"] * (new.steps() != steps)
                for step in steps:
                    told = _scripts.restored(new, step)
                    broken += [f"step {step}: {told}"] * (told != "right")
        finally:
            place.proxy.let_go_on()
    late = [said for said in ended.said if said.get("complete", 0) > latest]
    broken += [f"acknowledged: {said}" for said in late]
    errors = [said["error"] for said in ended.said if "error" in said]
    broken += [f"said: {error}" for error in errors if not error.startswith("CheckpointError")]
    # What it tries then is refused, since there are later steps.
    why = "has taken over|was written by another| writes in | is not after step "
    named = any(re.search(why, e) for e in errors)
    named |= {"complete": SAVES[-1]} in ended.said  # It had no more to do.
    return broken + [f"did not say why: {ended}"] * (not named or ended.status != 0)


def begun_step(place: Place) -> str:
    """A new directory in which a writer has died while it wrote the next step."""
    url = place.prepared(SCENARIOS["save, in the background"])
    # At its seal: by then all else is there.
    place.proxy.arm(RequestFault("kill", 2, only="PUT steps/3/_JZERO_SEAL"))
    dead = place.children.start("faults._scripts:save", root=url, steps=SAVES)
    place.proxy.client = dead.pid
    assert dead.wait().status == -9
    return url


@contextlib.contextmanager
def another_machine(lease: float = LEASE) -> Iterator[None]:
    """This process counts as one of another machine than children with a lease, and has as short a one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_world", "BEAT", "EXPIRES", "_MARGIN", "_LOOK"):
            patch.setattr(_lock, name, getattr(_lock, name))
        _scripts.on_machine("another of the tests", lease)
        yield


def _objects(url: str) -> dict[str, bytes]:
    """All objects but the lock, which its owner rewrites all the time."""
    bucket = _opened(url)
    found = {name: bucket.read(name) for name in bucket.names() if not name.endswith(_lock.NAME)}
    return {name: each.data for name, each in found.items() if each is not None}


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    """What is no longer as it was; what was on its way may come, under a name of its own."""
    return sorted(name for name in before if before[name] != after.get(name))


@contextlib.contextmanager
def place(kind: str) -> Iterator[Place]:
    """In a bucket of S3's, or of the double of Google's; the environment is that of the children."""
    server = {"s3": s3_server, "gs": gs_server}[kind]
    with (
        server.started() as endpoint, Proxy(endpoint) as proxy, pytest.MonkeyPatch.context() as patch
    ):  # fmt: skip
        server.set_environment(patch, proxy.endpoint)
        patch.setenv(PROXY, proxy.endpoint)
        with Children(["faults._scripts"]) as children:
            yield Place(children, proxy, f"{kind}://{s3_server.BUCKET}")


class BucketRun(Run):
    """A script that has run to its end in a bucket."""

    fault: RequestFault  # type: ignore[assignment]
    root: str  # type: ignore[assignment]

    def __init__(self, scenario: Scenario, place: Place, root: str, fault: RequestFault):
        self.scenario, self.children, self.fault, self.root = scenario, place.children, fault, root
        self._copies: list[tempfile.TemporaryDirectory] = []
        place.proxy.arm(fault)
        child = self.children.start(
            f"faults._scripts:{scenario.script}", root=root, **scenario.arguments
        )
        place.proxy.client = child.pid
        self.ended = child.wait()
        self.requests, self.hit = place.proxy.log, place.proxy.hit()  # type: ignore[misc]
        place.proxy.arm(RequestFault())

    hit: Request | None = None  # type: ignore[assignment]

    def folder(self, name: str) -> pathlib.Path:
        """A copy of what is there."""
        self._copies.append(tempfile.TemporaryDirectory())
        bucket, folder = _opened(f"{self.root}/{name}"), pathlib.Path(self._copies[-1].name)
        bucket.download(bucket.names(), folder)
        return folder

    def names(self) -> set[str]:
        return {name.split("/")[0] for name in _opened(self.root).names()}

    def remove(self) -> None:
        for copy in self._copies:
            copy.cleanup()

    def can_clean_up(self) -> bool:
        if self.hit is None or self.fault.ever or self.fault.kills:
            return False
        # Whether the index was written nobody knows then.
        last = self.hit.name == "PUT" and self.hit.target.endswith("index.json")
        return not last and self.hit.name not in ("DELETE", "HEAD")


def _opened(url: str) -> Bucket:
    found = Bucket.of("test", url)
    assert found is not None
    return found


def _copied(url: str, to: str) -> str:
    old, new = _opened(url), _opened(to)
    for name in old.names():
        found = old.read(name)
        assert found is not None
        new.write(name, found.data)
    return to
