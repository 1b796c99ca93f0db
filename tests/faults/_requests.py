# SPDX-License-Identifier: Apache-2.0
"""Faults of a bucket, one at a time: a proxy before its server that counts requests and fails the n-th."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

PROXY = "JZERO_TEST_PROXY"  # What the environment calls its endpoint.
CONTROL = "/-/disarm"  # What a client asks for when nothing is to fail any more.


class RequestFault(NamedTuple):
    """What happens at one request.

    Attributes:
      action: "count", nothing; "kill", the client before its request is passed on, or "kill_after" that,
        before the answer; so "stop" and "stop_after"; "answer" an error; "drop" the connection before the
        request is passed on, or "lose" it after; "cut" the answer; "stale", lists are those of before.
      at: the number of the request, from 1.
      status: of an "answer".
      ever: at all requests from this one on.
      only: which ones are counted, "PUT steps/3/": a regular expression; all, if it is empty.
    """

    action: str = "count"
    at: int = 0
    status: int = 503
    ever: bool = False
    only: str = ""

    @property
    def kills(self) -> bool:
        return self.action.startswith("kill")


class Request(NamedTuple):
    """A request that came, and what was answered: 0 for nothing."""

    number: int
    name: str
    path: str
    status: int

    @property
    def lists(self) -> bool:
        return "list-type=2" in self.path or urllib.parse.urlsplit(self.path).path.endswith("/o")

    @property
    def reads(self) -> bool:
        """Whether it changes nothing."""
        return self.name in ("GET", "HEAD")

    @property
    def target(self) -> str:
        """The object's name below the root of a scenario, or what is listed."""
        return self.key.partition("/")[2]

    @property
    def key(self) -> str:
        """The object's name."""
        url = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(url.query)
        found = re.fullmatch(r"(?:/upload)?/storage/v1/b/[^/]*/o/?(.*)|/[^/]*/?(.*)", url.path)
        named = (
            query.get("name")
            or query.get("prefix")
            or [found[1] or found[2] or "" if found else ""]
        )
        return urllib.parse.unquote(named[0])


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server; in threads of this process, until it is closed."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = urllib.parse.urlsplit(endpoint).netloc
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.client = 0  # the process that is killed
        self._lock = threading.Lock()
        self.arm(RequestFault())
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def arm(self, fault: RequestFault) -> None:
        """From now on requests are counted, and this happens at one of them."""
        with self._lock:
            self.fault, self.log, self._count = fault, list[Request](), 0
            self.created, self.removed, self.dead = set[str](), set[str](), False
            self.stopped, self._goes_on = threading.Event(), threading.Event()

    def disarm(self) -> None:
        """Nothing fails any more."""
        self.fault = self.fault._replace(action="count")

    def hit(self) -> Request | None:
        """The request that met the fault."""
        return next((request for request in self.log if request.number == self.fault.at), None)

    def number(self, request: Request) -> int:
        """From 1; 0 if it is not counted."""
        if not re.match(self.fault.only, f"{request.name} {request.target}"):
            return 0
        with self._lock:
            self._count += 1
            return self._count

    def meets(self, number: int) -> RequestFault:
        """What happens at this request."""
        fault = self.fault
        there = number == fault.at or (fault.ever and fault.at and number > fault.at)
        return fault if there else RequestFault()

    def changed(self, request: Request) -> None:
        """Keeps in mind what a stale list does not know."""
        with self._lock:
            if request.name == "DELETE" and request.status < 300:
                self.removed.add(request.key)
                self.created.discard(request.key)
            elif request.name in ("PUT", "POST") and request.status < 300:
                self.created.add(request.key)

    def kill(self) -> None:
        """The client is dead, and nothing that its threads may still ask for is heard."""
        self.dead = True
        os.kill(self.client, signal.SIGKILL)

    def stop(self) -> None:
        """The client stands still until it is continued."""
        os.kill(self.client, signal.SIGSTOP)
        self.stopped.set()
        self._goes_on.wait(60)

    def let_go_on(self) -> None:
        if not self._goes_on.is_set():
            self._goes_on.set()
            os.kill(self.client, signal.SIGCONT)

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_) -> None:
        """A client that is gone is no error."""

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class _Gone(Exception):
    """The connection ends without an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy
    _upstream: http.client.HTTPConnection | None = None

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == CONTROL:
            self.server.disarm()
            return self._answer(200, [], b"")
        self._log, request = self.server.log, Request(0, self.command, self.path, 0)
        request = request._replace(number=self.server.number(request))
        try:
            self._pass_on(request, self.server.meets(request.number), body)
        except _Gone:
            self.close_connection = True

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _any

    def _pass_on(self, request: Request, fault: RequestFault, body: bytes) -> None:
        """Passes a request on, and the answer back, as far as the fault has it."""
        action = fault.action
        if self.server.dead or action in ("drop", "kill"):
            # Before the client's end: who waits for that looks at the log.
            self._log.append(request)
            if action == "kill" and not self.server.dead:
                self.server.kill()
            raise _Gone
        if action == "answer":
            self._log.append(request._replace(status=fault.status))
            return self._answer(
                fault.status, [("content-type", "application/xml")], _error(fault.status)
            )
        if action == "stop":
            self.server.stop()
        status, headers, data = self._ask(body)
        self.server.changed(request._replace(status=status))
        if action in ("kill_after", "lose"):
            self._log.append(request)
            if action == "kill_after":
                self.server.kill()
            raise _Gone
        if action == "stop_after":
            self.server.stop()
        # Before the answer: who has it may look at the log.
        self._log.append(request._replace(status=status))
        if action == "stale" and request.lists and status == 200:
            data = _before(data, self.server.created, self.server.removed, request.key)
        self._answer(status, headers, data, half=action == "cut" and self.command == "GET")

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection(self.server.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        self._upstream.request(self.command, self.path, body, headers)
        answer = self._upstream.getresponse()
        return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers, data: bytes, half: bool = False) -> None:
        self.send_response_only(status)
        kept = [pair for pair in headers if pair[0].lower() not in _OURS]
        size = {name.lower(): value for name, value in headers}.get("content-length")
        length = size if self.command == "HEAD" and size else str(len(data))
        for name, value in [*kept, ("content-length", length)]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if half else data)
        if half:
            raise _Gone

    def log_message(self, *_) -> None:
        pass


_OURS = ("content-length", "transfer-encoding", "connection")
_CODES = {403: "AccessDenied", 404: "NoSuchKey", 409: "ConditionalRequestConflict", 412: "PreconditionFailed",
          500: "InternalError", 503: "SlowDown"}  # fmt: skip


def _error(status: int) -> bytes:
    code = _CODES[status]
    return f"<Error><Code>{code}</Code><Message>a fault of the tests</Message></Error>".encode()


def _before(data: bytes, created: set[str], removed: set[str], below: str) -> bytes:
    """A list without what was written since, and with what was removed."""
    back = sorted(key for key in removed if key.startswith(below))
    if not data.lstrip().startswith(b"<"):
        found = json.loads(data)
        items = [item for item in found.get("items", []) if item["name"] not in created]
        items += [{"name": key, "size": "1", "generation": "1"} for key in back]
        return json.dumps(found | {"items": items}).encode()
    entry = re.compile(r"<Contents>.*?<Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
    text = data.decode()
    text = entry.sub(lambda found: "" if found[1] in created else found[0], text)
    again = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size>"
        '<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>"0"</ETag></Contents>'
        for key in back
    )
    text = text.replace("</ListBucketResult>", f"{again}</ListBucketResult>")
    count = len(entry.findall(text))
    return re.sub(r"<KeyCount>\d+</KeyCount>", f"<KeyCount>{count}</KeyCount>", text).encode()


def faults_at(requests: list[Request]) -> Iterator[RequestFault]:
    """Of every request: the client's last moment twice, one error, and one error from then on."""
    once = [
        ("answer", 500), ("drop", 0), ("answer", 403), ("lose", 0), ("answer", 404), ("answer", 503),
        ("answer", 412), ("lose", 0), ("answer", 409),
    ]  # fmt: skip
    ever = [("answer", 503), ("drop", 0), ("answer", 403), ("lose", 0), ("answer", 500)]
    for request in requests:
        at = request.number
        yield RequestFault("kill", at)
        if not request.reads:
            yield RequestFault("kill_after", at)
        action, status = ("cut", 0) if request.reads and at % 3 == 0 else once[at % len(once)]
        if request.name == "DELETE" and status in (404, 412):
            status = 500  # To say of what is there that it is not is no fault but a lie.
        yield RequestFault(action, at, status)
        action, status = ever[at % len(ever)]
        yield RequestFault(action, at, status, ever=True)
        if request.lists:
            yield RequestFault("stale", at, ever=True)
