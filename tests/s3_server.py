# SPDX-License-Identifier: Apache-2.0
"""An S3 server of the tests: moto's, in a process of its own, with a bucket in it.

    def test_saves(s3): ...  # s3 is a directory of the bucket, such as s3://tests/3f9c01ab

The environment then has its endpoint and credentials, for this process and those that it starts. The server
ends when whoever started it ends, however that comes about: its stdin is closed then.
"""

import contextlib
import io
import json
import os
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

BUCKET = "tests"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_REGION": "us-east-1",
    # No other configuration of this machine counts.
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
}


@contextlib.contextmanager
def served(module: str) -> Iterator[str]:
    """The endpoint of a server in a process of its own, while it is entered."""
    server = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line, f"the server of {module} ended with {server.wait()}"
        yield json.loads(line)
    finally:
        server.stdin.close()
        server.kill()
        server.wait()
        server.stdout.close()


@contextlib.contextmanager
def started() -> Iterator[str]:
    """The endpoint of an S3 server with an empty bucket."""
    with served("s3_server") as endpoint:
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
        yield endpoint


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    pytest.importorskip("moto", reason="no S3 server: moto[server] is not installed")
    with started() as endpoint:
        yield endpoint


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory of the bucket that nobody else has; the environment to get there."""
    set_environment(monkeypatch, s3_endpoint)
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


def set_environment(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in CREDENTIALS.items() | {("AWS_ENDPOINT_URL", endpoint)}:
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)


def _one_at_a_time(app: Any) -> Any:
    """An application that answers one request after the other.

    moto looks whether an object is there, and then writes it: two threads of it may both find none. S3 does
    both at once. Requests are read before it is their turn, so that a slow one keeps nobody waiting.
    """
    lock = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        with lock:
            return app(environ, start_response)

    return answer


def serve() -> None:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    class Quiet(MotoRequestHandler):
        protocol_version = "HTTP/1.1"  # Connections stay open.

        def log(self, *_: Any) -> None:
            pass

    app = _one_at_a_time(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(f"http://127.0.0.1:{server.server_port}"), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve()
