# SPDX-License-Identifier: Apache-2.0
"""A directory in a bucket: of several writers of one object one wins."""

import concurrent.futures
import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator

import pytest

from jzero.checkpoint._bucket import Bucket, Lost

pytestmark = pytest.mark.one_release


def opened(url: str) -> Bucket:
    found = Bucket.of("test", url)
    assert found is not None
    return found


@pytest.fixture(params=["s3", "gs"])
def url(request) -> Iterator[str]:
    """A directory of moto's bucket, and one of the double of Google's."""
    return request.getfixturevalue(request.param)


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
    assert (bucket / "a").read("c").data == b""
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
@pytest.mark.parametrize("count", [2, 16])
def test_of_threads_one_wins(count, there, url):
    for name in "abcdef":
        version = opened(url).write(name, b"before") if there else None
        act = functools.partial(wins, url, name, version=version)
        won = in_threads(count, lambda i, act=act: act(data=b"%d" % i))
        assert won.count(True) == 1
        assert opened(url).read(name).data == b"%d" % won.index(True)


def race(url: str, barrier, results) -> None:
    name = multiprocessing.current_process().name
    bucket, version = opened(url), None
    for attempt in range(20):
        barrier.wait()
        # S3's version is a digest of the content, so each write has other content (as the writer's lock has).
        won = wins(url, "object", f"{name} {attempt}".encode(), version)
        barrier.wait()
        results.put(won)
        found = bucket.read("object")
        assert found is not None
        version = found.version


def test_of_two_processes_one_wins(url):
    """Twenty times, each on what the one before left."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    racers = [spawn.Process(target=race, args=(url, barrier, results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    won = [results.get(timeout=60) for _ in range(40)]
    for racer in racers:
        racer.join()
        assert racer.exitcode == 0
    assert won.count(True) == 20
