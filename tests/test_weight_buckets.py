"""Exports and imports in a bucket, by a real S3 server: all of the old or all of the new, and no rest."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint import _seal, _stream
from jzero.checkpoint._bucket import Bucket
from jzero.cli._main import main
from jzero.weights import _publish
from test_bucket import opened

OLD, NEW = 1.0, 2.0
PARTS = "100B"  # of one tensor each


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[float, pathlib.Path]:
    path = tmp_path_factory.mktemp("checkpoints")
    for value in (OLD, NEW):
        params = {name: np.full((25, 1), value, np.float32) for name in "abc"}
        ocp.PyTreeCheckpointer().save(path / str(value), {"params": params})
    return {value: path / str(value) for value in (OLD, NEW)}


def exported(url: str, folder: pathlib.Path) -> tuple[float | None, float | None]:
    """The value of all tensors, of the file and of the index; each whole."""
    bucket = opened(url)
    bucket.download(bucket.names(), folder)
    found: list[float | None] = []
    file, index = folder / "m.safetensors", folder / "m.safetensors.index.json"
    for there, read in (
        (file, lambda: load_file(file)),
        (index, lambda: {
            k: load_file(folder / v)[k] for k, v in json.loads(index.read_text())["weight_map"].items()
        }),
    ):  # fmt: skip
        values = read() if there.exists() else {}
        assert sorted(values) == (["a", "b", "c"] if there.exists() else [])
        numbers = {float(x) for tensor in values.values() for x in tensor.flat}
        assert len(numbers) == bool(values)
        found.append(numbers.pop() if numbers else None)
    return found[0], found[1]


@pytest.mark.parametrize("parts", [False, True])
def test_an_export_replaces_an_export_of_either_form(parts, s3, checkpoints, tmp_path, capsys):
    out = f"{s3}/m.safetensors"
    for i, old in enumerate((False, True)):
        size = {"max_file_size": PARTS} if old else {}
        jzero.export_weights(checkpoints[OLD], out, overwrite=True, **size)
        with pytest.raises(
            jzero.OptionError, match="already. Objects are only overwritten when asked"
        ):
            jzero.export_weights(checkpoints[NEW], out, max_file_size=PARTS)
        with pytest.raises(
            jzero.OptionError, match="already. Objects are only overwritten when asked"
        ):
            jzero.export_weights(checkpoints[NEW], out)
        assert exported(s3, tmp_path / f"old{i}") == ((None, OLD) if old else (OLD, None))
        flags = ["--max-file-size", PARTS] if parts else []
        main(["export", str(checkpoints[NEW]), out, "--overwrite", *flags])
        assert exported(s3, tmp_path / f"new{i}") == ((None, NEW) if parts else (NEW, None))
        assert len(opened(s3).names()) == (4 if parts else 1)
        assert capsys.readouterr().out.splitlines()[-1] == out + ".index.json" * parts


def test_two_exports_of_one_name(s3, checkpoints, tmp_path, monkeypatch):
    """The second begins and ends while the first is under way, which is told and removes its own."""
    jzero.export_weights(checkpoints[OLD], f"{s3}/m.safetensors", max_file_size=PARTS)
    staging = _publish.staging
    done: list[bool] = []

    def other_machine(who, target):
        if not done:
            done.append(True)
            # As of another machine, whose temporary directory is its own.
            monkeypatch.setattr(
                _publish, "staging", lambda who, _: staging(who, opened(f"{s3}/other"))
            )
            jzero.export_weights(
                checkpoints[NEW], f"{s3}/m.safetensors", max_file_size=PARTS, overwrite=True
            )
        return staging(who, target)

    monkeypatch.setattr(_publish, "staging", other_machine)
    with pytest.raises(jzero.OptionError, match="if another process wrote it just now"):
        jzero.export_weights(
            checkpoints[OLD], f"{s3}/m.safetensors", max_file_size=PARTS, overwrite=True
        )
    assert exported(s3, tmp_path / "now") == (None, NEW)
    assert len(opened(s3).names()) == 4


@pytest.mark.parametrize("num", range(6))
def test_an_export_that_dies_at_each_request(num, s3, checkpoints, tmp_path):
    """Then no request follows: the older one, or the new one; and the next export leaves no rest."""
    out, seen = f"{s3}/m.safetensors", []
    jzero.export_weights(checkpoints[OLD], out, max_file_size=PARTS)

    def dies(name):
        real = getattr(Bucket, name)

        def call(self, *args):
            seen.append(name)
            if len(seen) > num:
                raise KeyboardInterrupt
            return real(self, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_if", "remove", "remove_if"):
            patch.setattr(Bucket, name, dies(name))
        with pytest.raises(KeyboardInterrupt):
            jzero.export_weights(checkpoints[NEW], out, max_file_size=PARTS, overwrite=True)
    assert exported(s3, tmp_path / "found") == (None, NEW if num >= 4 else OLD)
    jzero.export_weights(checkpoints[NEW], out, max_file_size=PARTS, overwrite=True)
    assert exported(s3, tmp_path / "again") == (None, NEW)
    assert len(opened(s3).names()) == 4


def test_parts_that_no_index_names(s3, checkpoints):
    """Of an export that was killed: named, where another process may be about to name them; else removed."""
    bucket, left = opened(s3), "m-00001-of-00003.safetensors"
    bucket.write(left, b"left")
    with pytest.warns(UserWarning, match=f"no index names {left}. .* Remove them, if none does"):
        jzero.export_weights(checkpoints[OLD], f"{s3}/m.safetensors")
    assert bucket.names() == [left, "m.safetensors"]
    jzero.export_weights(
        checkpoints[NEW], f"{s3}/m.safetensors", max_file_size=PARTS, overwrite=True
    )
    assert len(bucket.names()) == 4
    assert left not in bucket.names()


def test_limits_of_files(s3, checkpoints, monkeypatch):
    with pytest.raises(
        jzero.OptionError, match="A file is uploaded in one request: at most 512 MB"
    ):
        jzero.export_weights(checkpoints[NEW], f"{s3}/m.safetensors", max_file_size="1GB")
    monkeypatch.setattr(_publish, "_MOST", 10)
    with pytest.raises(
        jzero.CheckpointError, match="a tensor has .* bytes, more than the 10 of one request"
    ):
        jzero.export_weights(checkpoints[NEW], f"{s3}/m.safetensors")
    assert opened(s3).names() == []


def test_import_from_and_to_a_bucket(s3, tmp_path, monkeypatch):
    """In ranges, columns too; then export and inspect read it there."""
    monkeypatch.setattr(_stream, "AT_ONCE", 1000)
    rng = np.random.default_rng(0)
    tensors = {f"{name}.weight": rng.normal(size=(40, 30)).astype(np.float32) for name in "abc"}
    save_file(tensors, tmp_path / "in.safetensors")
    bucket = opened(s3)
    bucket.write("in.safetensors", (tmp_path / "in.safetensors").read_bytes())
    table = jzero.WeightLayout("t", tuple(
        jzero.WeightRule(f"{x}.weight", f"{x}/kernel", "b a -> a b") for x in "abc"))  # fmt: skip
    jzero.import_weights(f"{s3}/in.safetensors", f"{s3}/pretrained", layout=table)
    jzero.export_weights(
        f"{s3}/pretrained", f"{s3}/out.safetensors", layout=table, max_file_size="5kB"
    )
    assert len([name for name in bucket.names() if name.startswith("out-")]) == 3
    bucket.write("hub/model.safetensors", (tmp_path / "in.safetensors").read_bytes())
    for i, url in enumerate((f"{s3}/hub", f"{s3}/hub/")):
        assert jzero.import_weights(url, tmp_path / f"hub{i}", layout=table) == 3
    jzero.import_weights(f"{s3}/out.safetensors.index.json", tmp_path / "ck", layout=table)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout=table)
    found = load_file(tmp_path / "out.safetensors")
    assert {k: v.tobytes() for k, v in found.items()} == {
        k: v.tobytes() for k, v in tensors.items()
    }
    main(["inspect", f"{s3}/pretrained", "--verify"])
    with pytest.raises(jzero.OptionError, match="there is something below .*pretrained already"):
        jzero.import_weights(f"{s3}/in.safetensors", f"{s3}/pretrained", layout=table)


def test_an_import_after_one_that_died(s3, tmp_path):
    """Its claim is replaced, what it left goes; and should it come back to life, it seals nothing."""
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "in.safetensors")
    bucket = opened(f"{s3}/ck")
    version = bucket.write_if(_seal.NAME, _seal.claim("a process"), None)
    data, fixed = f"state/d/{'0' * 32}", "state/_METADATA"
    for name in (data, fixed, "notes"):
        bucket.write(name, b"left")
    jzero.import_weights(tmp_path / "in.safetensors", f"{s3}/ck")
    assert {data, "notes"}.isdisjoint(bucket.names())
    with pytest.raises(Exception, match="_JZERO_SEAL"):
        bucket.write_if(_seal.NAME, b"seal", version)
    jzero.export_weights(f"{s3}/ck", tmp_path / "out.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "out.safetensors")["a"], jnp.ones(3))


@pytest.mark.parametrize("removes", [True, False])
def test_an_import_after_one_that_was_interrupted(removes, s3, tmp_path, monkeypatch):
    """Its data goes, with it or with the next one, which replaces what has a fixed name."""
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "in.safetensors")
    upload, remove, bucket = Bucket.upload, Bucket.remove, opened(f"{s3}/ck")

    def ends(self, *args):
        upload(self, *args)
        raise KeyboardInterrupt

    def refused(self, names):
        if names := [*names]:
            raise jzero.CheckpointError("refused")
        remove(self, names)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "upload", ends)
        if not removes:
            patch.setattr(Bucket, "remove", refused)
        with pytest.raises(KeyboardInterrupt):
            jzero.import_weights(tmp_path / "in.safetensors", f"{s3}/ck")
    left = [name for name in bucket.names() if "/d/" in name]
    assert bool(left) != removes
    jzero.import_weights(tmp_path / "in.safetensors", f"{s3}/ck")
    assert {*left}.isdisjoint(bucket.names())
    jzero.export_weights(f"{s3}/ck", tmp_path / "out.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "out.safetensors")["a"], jnp.ones(3))


def test_two_imports_of_one_name(s3, tmp_path, monkeypatch):
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "in.safetensors")
    upload, bucket = Bucket.upload, opened(f"{s3}/ck")

    def overtaken(self, files, owns):
        found = bucket.read(_seal.NAME)
        assert found is not None
        bucket.write_if(_seal.NAME, _seal.claim("another"), found.version)
        upload(self, files, owns)

    monkeypatch.setattr(Bucket, "upload", overtaken)
    with pytest.raises(jzero.CheckpointError, match="_JZERO_SEAL was written by another process"):
        jzero.import_weights(tmp_path / "in.safetensors", f"{s3}/ck")


def test_what_is_no_safetensors_file_in_a_bucket(s3, tmp_path):
    save_file({"a": np.ones(30, np.float32)}, tmp_path / "in.safetensors")
    data, bucket = (tmp_path / "in.safetensors").read_bytes(), opened(s3)
    for name, bad in (("short", data[:-1]), ("long", data + b"x")):
        bucket.write(f"{name}.safetensors", bad)
        with pytest.raises(
            jzero.CheckpointError, match="its tensors end at byte .*, and it does not"
        ):
            jzero.import_weights(f"{s3}/{name}.safetensors", tmp_path / "ck")
    with pytest.raises(
        jzero.CheckpointError, match="import .*: there is no object .*none.safetensors, "
    ):
        jzero.import_weights(f"{s3}/none.safetensors", tmp_path / "ck")
    with pytest.raises(jzero.CheckpointError, match="there is no .*none.safetensors.index.json"):
        jzero.import_weights(f"{s3}/none.safetensors.index.json", tmp_path / "ck")
