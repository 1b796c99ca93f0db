# SPDX-License-Identifier: Apache-2.0
"""A directory in a bucket: of several writers of one object one wins."""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from faults import Proxy, RequestFault
from jzero import CheckpointError
from jzero.checkpoint import _bucket
from jzero.checkpoint._bucket import Bucket, Lost

SOON = {"max_retries": 3, "initial_delay": "10ms", "max_delay": "20ms"}


def opened(url: str) -> Bucket:
    found = Bucket.of("test", url)
    assert found is not None
    return found


@pytest.fixture(params=["s3", "gs"])
def url(request) -> Iterator[str]:
    """A directory of moto's bucket, and one of the double of Google's."""
    return request.getfixturevalue(request.param)


def data_of(bucket: Bucket, name: str) -> bytes | None:
    found = bucket.read(name)
    return None if found is None else found.data


def wins(url: str, name: str, data: bytes, version: bytes | None) -> bool:
    try:
        opened(url).write_if(name, data, version)
    except Lost:
        return False
    return True


def in_threads(count: int, act: Callable[[int], bool]) -> list[bool]:
    """What so many threads bring that do it at once."""
    barrier = threading.Barrier(count)

    def one(number: int) -> bool:
        barrier.wait()
        return act(number)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_an_object_is_written_read_and_removed(url):
    bucket = opened(url)
    assert bucket.read("a/b") is None
    version = bucket.write("a/b", b"0123456789")
    assert bucket.read("a/b") == (b"0123456789", version)
    assert bucket.read_range("a/b", 2, 5) == b"234"
    (bucket / "a").write("c", b"")
    assert data_of(bucket / "a", "c") == b""
    assert bucket.names() == ["a/b", "a/c"]
    assert bucket.names("a/") == ["b", "c"]
    bucket.remove(["a/b", "nothing"])
    assert bucket.names() == ["a/c"]


def test_a_write_depends_on_the_version(url):
    bucket = opened(url)
    first = bucket.write_if("a", b"one", None)
    with pytest.raises(Lost):
        bucket.write_if("a", b"two", None)
    second = bucket.write_if("a", b"two", first)
    with pytest.raises(Lost):
        bucket.write_if("a", b"three", first)
    bucket.remove_if("a", first)
    assert bucket.read("a") == (b"two", second)
    bucket.remove_if("a", second)
    assert bucket.read("a") is None
    with pytest.raises(Lost):
        bucket.write_if("a", b"four", second)


@pytest.mark.parametrize("there", [False, True], ids=["absent", "by version"])
def test_of_threads_one_wins(there, url):
    for name in "abcdef":
        version = opened(url).write(name, b"before") if there else None

        def act(i: int, name: str = name, version: bytes | None = version) -> bool:
            return wins(url, name, b"%d" % i, version)

        won = in_threads(16, act)
        assert won.count(True) == 1
        assert data_of(opened(url), name) == b"%d" % won.index(True)


@pytest.fixture
def proxy(s3_endpoint, gs_endpoint, url, monkeypatch) -> Iterator[Proxy]:
    """Between tensorstore and the server of `url`; requests are tried again soon."""
    monkeypatch.setattr(_bucket, "_RETRIES", SOON)
    with Proxy(s3_endpoint if url.startswith("s3") else gs_endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", proxy.endpoint)
        yield proxy


@pytest.mark.parametrize("version", [False, True], ids=["absent", "by version"])
def test_a_write_whose_answer_was_lost_counts_once(version, proxy, url):
    """It is tried again, and meets what it wrote itself."""
    bucket = opened(url)
    before = bucket.write("a", b"before") if version else None
    proxy.arm(RequestFault("lose", 1))
    after = bucket.write_if("a", b"after", before)
    assert [request.status for request in proxy.log][:2] == [0, 412]
    assert bucket.read("a") == (b"after", after)


@pytest.mark.parametrize("status", [409, 412, 500, 503])
def test_what_is_answered_to_a_conditional_write(status, proxy, url):
    """A conflict is tried again (S3 answers 409 when two writes meet); of a condition nothing is."""
    bucket = opened(url)
    proxy.arm(RequestFault("answer", 1, status))
    if status == 412 or (status == 409 and url.startswith("gs")):
        with pytest.raises((Lost, CheckpointError), match=r"/a"):
            bucket.write_if("a", b"data", None)
        assert bucket.read("a") is None
    else:
        bucket.write_if("a", b"data", None)
        assert data_of(bucket, "a") == b"data"


CALLS = {
    "read": lambda bucket: bucket.read("a"),
    "write": lambda bucket: bucket.write("a", b""),
    "write_if": lambda bucket: bucket.write_if("a", b"", None),
    "remove": lambda bucket: bucket.remove(["a"]),
    "list": lambda bucket: bucket.names(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", [("answer", 403), ("answer", 503), ("lose", 0)], ids=str)
def test_what_fails_is_named(fault, call, proxy, url):
    """By a CheckpointError, when what was tried again has failed too."""
    bucket = opened(url)
    proxy.arm(RequestFault(fault[0], 1, fault[1], ever=True))
    with pytest.raises(
        CheckpointError, match=r"://tests/.* could not be (read|written|removed|listed): "
    ):
        CALLS[call](bucket)


def test_a_write_that_the_server_refuses_is_no_write(proxy, url):
    """tensorstore takes a 412 for the answer to a condition, though none was asked for."""
    proxy.arm(RequestFault("answer", 1, 412))
    with pytest.raises(CheckpointError, match=r"/a could not be written: "):
        opened(url).write("a", b"data")


def test_an_answer_that_ends_halfway_is_asked_for_again(proxy, url):
    bucket = opened(url)
    bucket.write("a", bytes(1000))
    proxy.arm(RequestFault("cut", 1))
    assert data_of(bucket, "a") == bytes(1000)
    assert len(proxy.log) == 2


@pytest.mark.slow
def test_an_endpoint_where_nobody_listens_is_told_within_a_minute(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="could not be read: "):
        opened(s3).read("a")
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("call", ["write", "write_if", "list", "read"])
def test_a_bucket_that_is_not_there(call, url):
    """It has no objects; what would write one is told."""
    scheme = url.partition(":")[0]
    bucket = opened(f"{scheme}://nothing/a")
    if call == "read":
        assert CALLS[call](bucket) is None
    else:
        with pytest.raises(
            CheckpointError, match=rf"{scheme}://nothing/a.* could not be (written|listed)"
        ):
            CALLS[call](bucket)
