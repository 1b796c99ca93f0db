# SPDX-License-Identifier: Apache-2.0
"""A directory in a bucket: of two writers of one object, one wins."""

import pytest

from jzero.checkpoint._bucket import Bucket, Lost


def opened(url: str) -> Bucket:
    found = Bucket.of("test", url)
    assert found is not None
    return found


def test_an_object_is_written_read_and_removed(s3):
    bucket = opened(s3)
    version = bucket.write("a/b", b"one")
    assert bucket.read("a/b") == (b"one", version)
    with pytest.raises(Lost):
        bucket.write_if("a/b", b"two", None)
    bucket.remove_if("a/b", version)
    assert bucket.read("a/b") is None
    assert bucket.names() == []
