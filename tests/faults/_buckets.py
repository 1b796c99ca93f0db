# SPDX-License-Identifier: Apache-2.0
"""The same scripts in a bucket: what they promise when a request fails, or is the last."""

from __future__ import annotations

import contextlib
import pathlib
import secrets
import tempfile
from collections.abc import Iterator

import pytest

import gs_server
import s3_server
from jzero.checkpoint._bucket import Bucket

from ._children import Children
from ._requests import PROXY, Proxy, Request, RequestFault
from ._scenarios import SCENARIOS, Outcome, Run, Scenario

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
        assert not (broken := run.broken()), broken
        return sorted(run.requests)

    def meet(self, scenario: Scenario, fault: RequestFault) -> Outcome:
        """Runs the script in a new directory, with a fault."""
        run = self._run(scenario, fault)
        return Outcome(fault, run.hit, run.noticed, run.broken())

    def _run(self, scenario: Scenario, fault: RequestFault) -> BucketRun:
        if scenario.name not in self._prepared:
            self._prepared[scenario.name] = self._new()
            scenario.prepare(self.children, self._prepared[scenario.name])
        return BucketRun(scenario, self, _copied(self._prepared[scenario.name], self._new()), fault)

    def _new(self) -> str:
        return f"{self.url}/{secrets.token_hex(4)}"


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
        self._copy = tempfile.TemporaryDirectory()
        bucket, folder = _opened(f"{self.root}/{name}"), pathlib.Path(self._copy.name)
        bucket.download(bucket.names(), folder)
        return folder

    def names(self) -> set[str]:
        return {name.split("/")[0] for name in _opened(self.root).names()}

    def can_clean_up(self) -> bool:
        """What is left in a bucket goes with the next one of the same name."""
        return False


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
