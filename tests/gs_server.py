# SPDX-License-Identifier: Apache-2.0
"""A double of Google Cloud Storage, for tests: the part of its JSON API that tensorstore's gcs driver calls.

Objects get, insert, delete and list, with ifGenerationMatch and ifGenerationNotMatch. It is no more than
that API's pages say of these: no such server that a package ships honours conditions. It proves what jzero
asks for and how it takes the answers, and nothing about Google's servers.
"""

import contextlib
import json
import re
import secrets
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest

from s3_server import BUCKET, served

PAGE = 1000  # names in an answer


class Stored(NamedTuple):
    data: bytes
    generation: int


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.objects, self.last = threading.Lock(), dict[str, Stored](), 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self._answer_to(self._list if self._name is None else self._get)

    def do_POST(self) -> None:
        self._answer_to(self._insert)

    def do_DELETE(self) -> None:
        self._answer_to(self._delete)

    def _answer_to(self, method) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length") or 0))
        with self.server.lock:
            status, data, headers = method() if self._bucket == BUCKET else (404, b"", {})
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    @property
    def _url(self) -> urllib.parse.SplitResult:
        return urllib.parse.urlsplit(self.path)

    @property
    def _query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self._url.query, keep_blank_values=True))

    @property
    def _bucket(self) -> str:
        return re.match(r"(?:/upload)?/storage/v1/b/([^/]*)", self._url.path)[1]  # type: ignore[index]

    @property
    def _name(self) -> str | None:
        """The object of the path; None if it is a bucket's."""
        found = re.fullmatch(r"/storage/v1/b/[^/]*/o/(.+)", self._url.path)
        return urllib.parse.unquote(found[1]) if found else None

    def _refused(self, found: Stored | None) -> int | None:
        """The status if a condition does not hold; what is not there is generation 0."""
        generation, query = found.generation if found else 0, self._query
        if int(query.get("ifGenerationMatch", generation)) != generation:
            return 412
        if int(query.get("ifGenerationNotMatch", -1)) == generation:
            return 304
        return None

    def _get(self):
        found = self.server.objects.get(str(self._name))
        if found is None:
            return 404, b"", {}
        if refused := self._refused(found):
            return refused, b"", {}
        headers = {"x-goog-generation": str(found.generation)}
        if self._query.get("alt") != "media":
            return 200, json.dumps(_metadata(str(self._name), found)).encode(), headers
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("range") or "")
        size = len(found.data)
        if not asked:
            return 200, found.data, headers
        start = int(asked[1]) if asked[1] else max(size - int(asked[2]), 0)
        stop = min(int(asked[2]) + 1, size) if asked[1] and asked[2] else size
        if start >= size:
            return 416, b"", {"content-range": f"bytes */{size}"}
        headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, found.data[start:stop], headers

    def _insert(self):
        name = self._query["name"]
        if refused := self._refused(self.server.objects.get(name)):
            return refused, b"", {}
        self.server.last += 1
        new = self.server.objects[name] = Stored(self.body, self.server.last)
        return 200, json.dumps(_metadata(name, new)).encode(), {}

    def _delete(self):
        found = self.server.objects.get(str(self._name))
        if found is None:
            return 404, b"", {}
        if refused := self._refused(found):
            return refused, b"", {}
        del self.server.objects[str(self._name)]
        return 204, b"", {}

    def _list(self):
        query = self._query
        start = query.get("pageToken") or query.get("startOffset", "")
        stop = query.get("endOffset")
        names = sorted(self.server.objects)
        names = [name for name in names if name >= start and (not stop or name < stop)]
        answer: dict = {
            "items": [_metadata(name, self.server.objects[name]) for name in names[:PAGE]]
        }
        if names[PAGE:]:
            answer["nextPageToken"] = names[PAGE]
        return 200, json.dumps(answer).encode(), {}

    def log_message(self, *_) -> None:
        pass


def _metadata(name: str, found: Stored) -> dict[str, str]:
    return {"name": name, "size": str(len(found.data)), "generation": str(found.generation)}


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The endpoint of the double, with an empty bucket."""
    with served("gs_server") as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gs_endpoint() -> Iterator[str]:
    with started() as endpoint:
        yield endpoint


@pytest.fixture
def gs(gs_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of the double's bucket that nobody else has; the environment to get there."""
    set_environment(monkeypatch, gs_endpoint)
    return f"gs://{BUCKET}/{secrets.token_hex(4)}"


def set_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", endpoint)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "testing")


def serve() -> None:
    server = Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(f"http://127.0.0.1:{server.server_port}"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve()
