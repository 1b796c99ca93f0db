"""Runs measurements as processes of their own within a budget, and goes on where an earlier call stopped.

What is found is a line of JSON in a file as soon as it is known, on the disk before the next: a process, this
one too, that is killed at any time loses only what it had not reached. The next call reads that file.
"""

import collections
import contextlib
import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from experiments.shared import records

Result = dict[str, Any]
FINAL = ("ok", "skipped", "no device memory", "no host memory")  # All others are tried again.
ENOUGH = 0.4  # of a job's seconds: with less left it is not begun, since it might be cut
UNDER_WAY = "under way"  # What still says so was killed together with its driver.
JOBS = max(2, min(4, len(os.sched_getaffinity(0))))  # that run together
# Linux kills what asked for it (PR_SET_PDEATHSIG) when the thread that started it ends, as by a kill.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Job(NamedTuple):
    """A process that prints lines of JSON, each with all that it knows so far.

    Attributes:
      name: under which its result is kept.
      command: Python's arguments.
      seconds: after which it is killed; most take half of them.
      together: whether others may run beside it, as they may where no time is taken.
      env: of its environment, beside the driver's.
      read: the name and status that a line tells which is no JSON; then all that it prints goes to a file.
    """

    name: str
    command: Sequence[str]
    seconds: float
    together: bool = False
    env: Mapping[str, str] = {}
    read: Callable[[str], tuple[str, str] | None] | None = None


class Part(NamedTuple):
    """Jobs in the order of their worth.

    Attributes:
      name: of the part.
      seconds: for all of it in one call, as long as other parts have jobs that were never tried.
      jobs: by what is known so far, so that a search can ask for its next trial.
    """

    name: str
    seconds: float
    jobs: Callable[[dict[str, Result]], Iterable[Job]]


class Results:
    """All results in a file; of each device, release of JAX and name the last line counts.

    Attributes:
      here: those of this device and JAX, by name.
      unreadable: lines of the file that are no results: they stay, for somebody to look at.
    """

    def __init__(self, path: Path, device: str, jax: str):
        self.path, self._key, self._lock = path, (device, jax), threading.Lock()
        self._all: dict[tuple[str, str], dict[str, Result]] = collections.defaultdict(dict)
        self.unreadable = 0
        for text in path.read_bytes().splitlines() if path.exists() else ():
            try:
                line = json.loads(text)
                "" + line["status"] + line["at"]
                self._all[line["device"], line["jax"]]["" + line["name"]] = line
            except (ValueError, KeyError, TypeError, RecursionError):
                self.unreadable += bool(text.strip())
        self.here = self._all[self._key]

    def add(self, name: str, result: Result) -> None:
        now = datetime.datetime.now().isoformat(timespec="seconds")
        device, jax = self._key
        with self._lock:
            self.here[name] = result | {"device": device, "jax": jax, "name": name, "at": now}
            try:
                self._end_line()
                records.append(self.path, self.here[name])
            except OSError as error:  # A full disk: the page has it all the same.
                print(f"{self.path.name} could not be written: {error}", flush=True)

    def _end_line(self) -> None:
        """The last line may be cut off, and another would be joined to it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                file.write(b"\n" * (file.read() != b"\n"))

    def groups(self) -> dict[tuple[str, str], dict[str, Result]]:
        """By device and JAX, of those that have any."""
        with self._lock:
            return {key: dict(found) for key, found in self._all.items() if found}


class Driver:
    """Runs what has no result yet, then what was cut or failed, until the time is over."""

    def __init__(
        self, results: Results, end: float, env: Mapping[str, str], *,
        again: Sequence[str] = (), tell: Callable[[str, Result], None] = lambda *_: None,
    ) -> None:  # fmt: skip
        """Runs nothing yet.

        Args:
          results: what is known; what is found goes there.
          end: of the time there is, by `time.monotonic`.
          env: the environment of all processes.
          again: words of which a name must have one to be measured again, though it has a result.
          tell: is called with each name and result.
        """
        self.results, self._end, self._env = results, end, env
        self._again, self._tell = again, tell
        self._tried: set[str] = set()
        self._running: set[int] = set()
        self._stopped, self._telling = False, threading.Lock()

    def run(self, parts: Sequence[Part]) -> None:
        """Never tried within each part's time, then in what is left, and then what did not succeed."""
        try:
            for failed, budgets in ((False, True), (False, False), (True, False)):
                for part in parts:
                    end = time.monotonic() + part.seconds if budgets else self._end
                    self._run(part, min(end, self._end), failed)
        finally:
            self.stop()

    def stop(self) -> None:
        """Kills what runs, with all that it has started: memory of the GPU among it."""
        self._stopped = True
        for group in list(self._running):
            _kill(group)

    def _run(self, part: Part, end: float, failed: bool) -> None:
        """Until there is no time to begin what comes next; what has begun may run to the end of the call."""
        while todo := [job for job in part.jobs(self.results.here) if self._due(job.name, failed)]:
            jobs = list(itertools.takewhile(lambda job: job.together, todo)) or todo[:1]
            pool = ThreadPoolExecutor(JOBS)
            try:
                begun = list(pool.map(lambda job: self._one(job, end), jobs))
            except BaseException:  # Ctrl-C, or told to end: nobody waits for what runs.
                self.stop()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
            if not all(begun):
                return

    def _due(self, name: str, failed: bool) -> bool:
        known = name in self.results.here and not any(word in name for word in self._again)
        done = known and self.results.here[name]["status"] in FINAL
        return name not in self._tried and known == failed and not done

    def _one(self, job: Job, end: float) -> bool:
        """Runs one; False if there is no time for it."""
        start = time.monotonic()
        if self._stopped or end - start < ENOUGH * job.seconds:
            return False
        self._tried.add(job.name)
        self.results.add(job.name, {"status": UNDER_WAY})
        code, result, error = self._process(job, min(job.seconds, self._end - start))
        seconds = round(time.monotonic() - start, 1)
        if code != 0:  # What is known already counts, though its exit is told.
            known = {None: f"cut after {seconds:.0f} s", -signal.SIGKILL: "killed: host memory?"}
            key = "ended" if result.get("status") in FINAL else "status"
            result[key] = known.get(code, f"failed, exit {code}")
        flags = {**self._env, **job.env}.get("XLA_FLAGS", "")
        result = {"status": "ok"} | result | {"seconds": seconds, "flags": flags}
        if result["status"] not in FINAL:
            result.setdefault("error", error[-1500:])
        self.results.add(job.name, result)
        with self._telling:
            self._tell(job.name, result)
        return True

    def _process(self, job: Job, limit: float) -> tuple[int | None, Result, str]:
        """Exit code, None if it was cut; the last that it knew; and its errors, or the last of its log."""
        result: Result = {}
        logged: collections.deque[str] = collections.deque(maxlen=20)

        def read(output: Iterable[str]) -> None:
            for line in output:
                if line.startswith("{"):
                    with contextlib.suppress(json.JSONDecodeError):
                        result.update(json.loads(line))
                        self.results.add(job.name, {"status": UNDER_WAY} | result)
                elif job.read is not None:
                    logged.append(line)
                    self._log(job, line)

        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            # What it leaves on the disk that is measured goes with it, also if it is killed.
            tempfile.TemporaryDirectory(None, None, self._env.get("DISK"), True) as disk,
        ):
            # A group of its own, to be killed as a whole; in this session, so that it ends with it.
            process = subprocess.Popen(
                [sys.executable, "-c", _TIED, *job.command], cwd=records.ROOT,
                env={**self._env, **job.env, "DISK": disk}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if job.read else errors,
                text=True, errors="replace", process_group=0,
            )  # fmt: skip
            self._running.add(process.pid)
            assert process.stdout is not None
            reader = threading.Thread(target=read, args=(process.stdout,), daemon=True)
            reader.start()
            if self._stopped:  # Just now, before it was among those that run.
                _kill(process.pid)
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill(process.pid)
                process.wait()
                reader.join(10)  # Nobody is left to write, unless it has left the group.
                if not reader.is_alive():
                    process.stdout.close()
                self._running.discard(process.pid)
            errors.seek(0)
            return None if self._stopped else code, result, errors.read() + "".join(logged)

    def _log(self, job: Job, line: str) -> None:
        """Keeps what a process says that has no JSON, pytest above all."""
        assert job.read is not None
        with (self.results.path.parent / f"{job.name}.txt").open("a") as file:
            file.write(line)
        if (told := job.read(line)) is not None:
            name, status = told
            self.results.add(name, {"status": status})


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
