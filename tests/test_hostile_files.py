"""Files that are damaged, or made to do harm: refused within a second and with a reason, or read right."""

import collections
import contextlib
import copy
import json
import os
import pathlib
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

import jzero
from jzero import _json
from jzero.checkpoint import _inspect
from jzero.weights import _export, _import, _safetensors, _sources

SECONDS = 5  # of this process, for one file; the machine may be busy with others
DEEP = b"[" * 10**5 + b"]" * 10**5
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**63, 2**64, 10**300, "", "..", "/", "\0", "a" * 5000, "é\u202e", [], {},
    [0, 10**4000 // 7], [[]] * 100, {"a": {"b": {}}}, [-1, 8], ["a"], "F32", 1e308, -0.0,
]  # fmt: skip
TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b'\\ud800"', b"\xff", b"\0", b"-", b"0",
    b"9", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b" ", b"\n", b"\xef\xbb\xbf", b"9" * 5000,
    b"\\u", b"//",
]  # fmt: skip


def mutated(rng: random.Random, data: bytes) -> bytes:
    """JSON with one thing changed: in its bytes, or in what they mean."""
    return rng.choice([in_bytes] * 5 + BY_VALUE * 2)(rng, data)


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """A bit flipped, the end cut off, a token inserted, some bytes left out or repeated."""
    at = rng.randrange(len(data))
    before, behind = data[:at], data[at:]
    rest = (
        bytes([data[at] ^ 1 << rng.randrange(8)]) + behind[1:], b"", rng.choice(TOKENS) + behind,
        behind[rng.randrange(1, 20) :], behind[:30] + behind,
    )  # fmt: skip
    return before + rng.choice(rest)


def replace(rng: random.Random, data: bytes) -> bytes:
    """Another value in some place, of another type as a rule."""
    return edited(
        rng, data, lambda at, key: at.__setitem__(key, copy.deepcopy(rng.choice(HOSTILE)))
    )


def remove(rng: random.Random, data: bytes) -> bytes:
    return edited(rng, data, lambda parent, key: parent.__delitem__(key))


def rename(rng: random.Random, data: bytes) -> bytes:
    """Another key, or one more item."""

    def change(parent: Any, key: Any) -> None:
        if isinstance(parent, dict):
            parent[str(rng.choice(HOSTILE))] = parent.pop(key)
        else:
            parent.append(rng.choice(HOSTILE))

    return edited(rng, data, change)


def nest(rng: random.Random, data: bytes) -> bytes:
    changed = edited(rng, data, lambda parent, key: parent.__setitem__(key, "DEEP"))
    return changed.replace(b'"DEEP"', DEEP)


def edited(rng: random.Random, data: bytes, change: Callable[[Any, Any], None]) -> bytes:
    root = {"root": json.loads(data)}
    change(*rng.choice([*places(root)][1:] or [(root, "root")]))
    return json.dumps(root.get("root")).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, (dict, list)):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from places(value[key])


BY_VALUE: list[Callable[[random.Random, bytes], bytes]] = [replace, remove, rename, nest]


class Timed:
    """Runs, and remembers the longest."""

    def __init__(self) -> None:
        self.worst = 0.0

    def __call__(self, function: Callable[[], Any]) -> Any:
        """What it returns, or the `CheckpointError` that it raises; there is no third thing."""
        start = time.process_time()
        try:
            return function()
        except jzero.CheckpointError as error:
            return error
        finally:
            self.worst = max(self.worst, time.process_time() - start)


def arrays(rng: random.Random) -> dict[str, np.ndarray]:
    dtypes = [np.float32, np.float16, np.int64, np.uint8, np.bool_]
    shapes = [(), (2,), (3, 1), (0, 4), (2, 2, 2)]
    names = ["w", "layers.0.w", "layers.1.w", "é", "b/c", "scale"]
    return {
        name: np.ones(rng.choice(shapes), rng.choice(dtypes))
        for name in rng.sample(names, rng.randrange(1, 5))
    }


def mutated_file(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with another header, of a right or a wrong length; or with other data."""
    length = int.from_bytes(data[:8], "little")
    text, rest = data[8 : 8 + length], data[8 + length :]
    kind = rng.randrange(10)
    if kind == 0:
        lie = rng.choice(
            [0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, rng.randrange(256)]
        )
        return lie.to_bytes(8, "little") + text + rest
    if kind == 1:
        return data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(8)
    text = mutated(rng, text)
    return len(text).to_bytes(8, "little") + text + rest


def as_theirs(data: bytes) -> dict[str, Any] | None:
    """What the safetensors library reads, or None if it refuses."""
    try:
        return {
            name: (t["dtype"], tuple(t["shape"]), bytes(t["data"]))
            for name, t in safetensors.deserialize(data)
        }
    except (safetensors.SafetensorError, ValueError):
        return None


def as_ours(path: pathlib.Path) -> dict[str, Any]:
    dtypes = {dtype: name for name, dtype in _safetensors.DTYPES.items()}
    data = path.read_bytes()
    return {
        t.name: (dtypes[t.dtype], t.shape, data[t.start : t.start + t.nbytes])
        for t in _safetensors.read_header("test", _sources.find("test", path))
    }


def test_mutated_headers(tmp_path):
    """3,000: whatever is read is what the safetensors library reads, and what it refuses is refused."""
    rng, timed, counts = random.Random(0), Timed(), collections.Counter[str]()
    whole, path = tmp_path / "whole", tmp_path / "in.safetensors"
    for i in range(3000):
        if i % 30 == 0:
            save_file(arrays(rng), whole, {"format": "np"} if rng.random() < 0.5 else None)
        data = mutated_file(rng, whole.read_bytes())
        path.write_bytes(data)
        ours, theirs = timed(lambda: as_ours(path)), as_theirs(data)
        counts[f"ours {type(ours).__name__}, theirs {type(theirs).__name__}"] += 1
        if not isinstance(ours, jzero.CheckpointError):
            assert ours == theirs, data
        elif i % 30 == 0:  # Nothing is left of what is refused.
            with pytest.raises(jzero.CheckpointError):
                _import.import_weights(path, tmp_path / "ck")
            assert sorted(found.name for found in tmp_path.iterdir()) == ["in.safetensors", "whole"]
    print(dict(counts), f"{timed.worst:.3f} s at worst")
    assert timed.worst < SECONDS
    assert counts["ours dict, theirs dict"] > 100


def test_mutated_files_are_imported_right(tmp_path):
    """A sample of those that can be read, and of those that cannot, all the way to a checkpoint and back."""
    rng, timed, num = random.Random(1), Timed(), 0
    path, ck, out = (tmp_path / name for name in ("in.safetensors", "ck", "out.safetensors"))
    for i in range(300):
        save_file(arrays(rng), path)
        data = mutated_file(rng, path.read_bytes())
        path.write_bytes(data)
        found = timed(partial(_import.import_weights, path, ck / str(i), prefix=""))
        theirs = as_theirs(data)
        if isinstance(found, jzero.CheckpointError):
            assert not (ck / str(i)).exists()
            continue
        num += 1
        _export.export_weights(ck / str(i), out, select="", overwrite=True)
        assert theirs is not None
        expected = {name.replace("/", "."): tensor for name, tensor in theirs.items()}
        assert as_ours(out) == expected
    assert num > 5
    assert timed.worst < SECONDS
    assert not [left for left in ck.iterdir() if not left.name.isdecimal()]


def tensor(shape: Any, offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_size(size: str) -> bytes:
    return file_of(
        b'{"a":{"dtype":"F32","shape":[0,%s],"data_offsets":[0,0]}}' % size.encode(), b""
    )


HEADERS = {
    "empty": (b"", "it has no bytes 0 to 8"),
    "too short": ((1000).to_bytes(8, "little") + b"{}", "it has no bytes 8 to 1008"),
    "too long": (b"\xff" * 8 + b"{}", "its header would have 18446744073709551615 bytes, not 2 to"),
    "no text": (file_of(b"\xff\xfe"), "its header is not JSON"),
    "a list": (file_of([1, 2]), "its header is not a JSON object"),
    "no entry": (file_of({"a": {"dtype": "F32"}}), "a.shape is missing"),
    "shape": (file_of({"a": tensor([-2])}), "'a' has shape [-2]"),
    "overlap": (file_of({"a": tensor([2]), "b": tensor([2], [4, 12])}, bytes(12)), "[4, 12], not [8, 16]"),
    "cut": (file_of({"a": tensor([2])}, bytes(7)), "its tensors end at byte 77, and it does not"),
    "none": (file_of({}, b""), "there are no tensors in it"),
    "path": (
        file_of({"a": tensor([2]), "a.b": tensor([2], [8, 16])}, bytes(16)),
        "params/a would be a leaf, and have leaves below it",
    ),
    "same": (
        file_of({"a/b": tensor([2]), "a.b": tensor([2], [8, 16])}, bytes(16)),
        "params/a/b would be 2 leaves",
    ),
    "all that fails": (
        file_of({"a": tensor([2], dtype="X"), "b": tensor([3], [8, 16]), "c": tensor([2], [16, 24])}),
        "2 entries fail:\n  - 'a' has dtype 'X', not one of F64, F32, F16, BF16, F8_E4M3, F8_E5M2, I64, I32, "
        "I16, I8, U64, U32, U16, U8, BOOL\n  - 'b' has bytes [8, 16], not [8, 20]\n",
    ),
    "many digits": (with_size("1" + "0" * 4000), "an integer has 4001 digits, more than 640"),
    "no array": (with_size(str(2**62)), "'a' has shape [0, 4611686018427387904]"),
    "overflow": (file_of({"a": tensor([2**62, 2**62, 0])}), "'a' has shape [46"),
    "rank": (file_of({"a": tensor([1] * 33)}), "'a' has shape [1, 1, 1, 1, 1, 1, ...]"),
    "true": (file_of({"a": tensor([2, True])}), "a.shape.1 is True, not an integer"),
    "minus zero": (
        file_of(json.dumps({"a": tensor([2])}).encode().replace(b"[0,", b"[-0,")),
        "a.data_offsets.0 is -0.0, not an int",
    ),
    "offsets": (file_of({"a": tensor([2], [0, 8, 16])}), "'a' has bytes [0, 8, 16], not [0, 8]"),
    "dtype list": (file_of({"a": tensor([2], dtype=["F32"])}), "a.dtype is ['F32'], not a text"),
    "long dtype": (file_of({"a": tensor([2], dtype="F" * 10**6)}), "has dtype 'FFFFFFF"),
    "metadata": (file_of({"__metadata__": {"a": 1}}, b""), "__metadata__.a is 1, not a text"),
    "space": (file_of(b' {"a": 1}'), "its header is not a JSON object"),
    "surrogate": (file_of(b'{"\\ud800": 1}'), "its header is not JSON: 'utf-8' codec can't encode"),
    "mark": (file_of(b"\xef\xbb\xbf{}"), "its header is not JSON: Unexpected UTF-8 BOM"),
    "deep": (file_of(b'{"a":' * 101 + b"1" + b"}" * 101), "its header is 101 values deep, more than 100"),
    "long name": (file_of({"a" * 10**6: tensor([2])}), "has 1000007 bytes, more than 1000"),
    "empty part": (file_of({"a..b": tensor([2])}), "'a..b' has an empty part between its dots"),
    "parent": (file_of({"a/../b": tensor([2])}), "'a/../b' has an empty part"),
    "nul": (file_of({"a\0b": tensor([2])}), "'a\\x00b' has characters that cannot be printed"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers(name, tmp_path):
    content, text = HEADERS[name]
    (tmp_path / "in.safetensors").write_bytes(content)
    found = (timed := Timed())(
        lambda: _import.import_weights(tmp_path / "in.safetensors", tmp_path / "ck")
    )
    assert isinstance(found, jzero.CheckpointError)
    assert text in str(found)
    assert len(str(found)) < 1000
    assert timed.worst < SECONDS
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]


def test_empty_arrays_of_any_size(tmp_path):
    (tmp_path / "in.safetensors").write_bytes(with_size(str(2**40)))
    assert _import.import_weights(tmp_path / "in.safetensors", tmp_path / "ck") == 1
    (entry,) = _inspect.inspect(tmp_path / "ck")[0].leaves
    assert entry.shape == (0, 2**40)


def test_what_is_no_file(tmp_path):
    """A directory, a pipe, a device and a loop of links, in the place of each file that an import reads.

    Links to files are followed: Hugging Face's cache has them.
    """
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    reasons = {
        "directory": "Is a directory",
        "pipe": "Not a regular file",
        "loop": "Too many levels of symbolic links",
        "zero": "Not a regular file",
        "nothing": "No such file or directory",
        "n\0l": "Invalid argument",
        "half\ud800": "Invalid argument",
    }
    for name, reason in reasons.items():
        text = "no model.safetensors or" if name == "directory" else f"cannot be read: {reason}"
        with pytest.raises(jzero.CheckpointError, match=text):
            _import.import_weights(tmp_path / name, tmp_path / "ck")
        with pytest.raises(jzero.CheckpointError, match=f"it cannot be read: {reason}"):
            _json.read("test", tmp_path / name)
        if "\0" in name or not name.isascii():
            continue
        (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(jzero.CheckpointError, match=f"{name} cannot be read: {reason}"):
            _import.import_weights(tmp_path / "index.json", tmp_path / "ck")
    assert not (tmp_path / "ck").exists()
    save_file({"a": np.ones(2)}, tmp_path / "blob")
    (tmp_path / "link").symlink_to("blob")
    assert _import.import_weights(tmp_path / "link", tmp_path / "ck") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tmp_path):
    (tmp_path / "in.safetensors").write_bytes(file_of({"a": tensor([2])}))
    (tmp_path / "in.safetensors").chmod(0)
    with pytest.raises(jzero.CheckpointError, match="cannot be read: Permission denied"):
        _import.import_weights(tmp_path / "in.safetensors", tmp_path / "ck")


@pytest.mark.parametrize("prefix", ["a//b", "..", "a\0b", "a" * 1001, "\ud800"])
def test_prefixes(prefix, tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "in.safetensors")
    with pytest.raises(
        jzero.OptionError, match=r"(?s)^import: prefix=.* has .*Leave it out for params"
    ):
        _import.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", prefix=prefix)
    assert not (tmp_path / "ck").exists()


def test_outputs_that_no_file_can_have(tmp_path):
    save_file({"a": np.ones(2)}, tmp_path / "in.safetensors")
    for write in (_import.import_weights, _export.export_weights):
        for name in ("a\0b.safetensors", "a\ud800.safetensors"):
            with pytest.raises(jzero.OptionError, match="No file can be called that"):
                write(tmp_path / "in.safetensors", str(tmp_path / name))


JSON = {
    "empty": (b"", "it is not JSON: Expecting value"),
    "many values": (
        b"[" + b"1," * 10**7 + b"1]",
        "it has up to 10000002 values, more than 5000000",
    ),
    "many texts": (
        b'["' + b'","' * 10**7 + b'"]',
        "it has up to 10000001 values, more than 5000000",
    ),
    "digits": (b"1" * 641, "an integer has 641 digits"),
    "constant": (b"[-Infinity]", "it is not JSON: -Infinity is no number"),
    "twice": (b'[{"a": 1, "b": 2, "\\u0061": 3}]', "'a' is there twice"),
    "behind": (b"{} {}", "it is not JSON: Extra data"),
    "list": (b'["\\udc00"]', "it is not JSON: 'utf-8' codec can't encode character"),
}


@pytest.mark.parametrize("name", JSON)
def test_what_is_no_json(name, tmp_path):
    data, text = JSON[name]
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(jzero.CheckpointError) as caught:
        _json.read("test", tmp_path / "a.json")
    assert str(caught.value).startswith(f"test {tmp_path / 'a.json'}: {text}")
    assert "It is a JSON file of ordinary size and depth. It is damaged, " in str(caught.value)
    os.truncate(tmp_path / "a.json", 10**12)
    with pytest.raises(
        jzero.CheckpointError, match="it has 1000000000000 bytes, more than 1000000"
    ):
        _json.read("test", tmp_path / "a.json")


def test_what_is_json():
    """All that others may write, within bounds."""
    value = {
        "a": [1, -2.5, 1e300, None, True, 'é\n"\\', "😀", {}, []],
        "b" * 1000: 10**639,
        "": {"": 0},
    }
    for ascii_only in (True, False):
        assert _json.parse(json.dumps(value, ensure_ascii=ascii_only, indent=1).encode()) == value
    deep = json.loads("[" * 99 + '"[{"' + "]" * 99)
    assert _json.parse(json.dumps([deep]).encode()) == [deep]


# The JSON of a checkpoint: through everything that reads it.


class Batches:
    """A data iterator."""

    state: Any = {"epoch": 3, "order": [4, 1, 5], "name": "train"}

    def __init__(self) -> None:
        self.now = self.state

    def get_state(self) -> Any:
        return self.now

    def set_state(self, state: Any) -> None:
        self.now = state


def step_fn(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["params"]["w"])
    params = {"w": state["params"]["w"] - 0.1 * grads}
    return {"params": params, "mu": state["mu"] + grads, "count": state["count"] + 1}


def new_state():
    w = jnp.arange(16.0).reshape(8, 2)
    return {"params": {"w": w}, "mu": w + 1, "count": jnp.int32(3)}


class Files:
    """A checkpoint, an export of it, and what each reader makes of them."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.steps, self.out = directory / "steps", directory / "out"
        self.train_step = jzero.shard_train_step(step_fn, stage=3)
        self.train_step(self.train_step.shard(new_state()), jnp.ones((8, 8)))  # Now it knows roles.
        with jzero.Checkpointer(self.steps, self.train_step) as checkpointer:
            checkpointer.save(1, self.train_step.shard(new_state()), Batches())
        self.out.mkdir()
        save_file({"a": np.ones(3), "b": np.zeros(2)}, self.out / "1.safetensors")
        weight_map = {"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}
        self.index = self.out / "i.json"
        self.index.write_text(json.dumps({"metadata": {"total_size": 40}, **weight_map}))
        self.num = 0

    def restore(self) -> Any:
        return self._values(jzero.restore(self.steps / "1", self.train_step, new_state()))

    def restore_latest(self) -> Any:
        batches = Batches()
        batches.now = None
        with jzero.Checkpointer(self.steps, self.train_step) as checkpointer:
            state = checkpointer.restore(new_state(), data_iterator=batches)
        return self._values(state), batches.now

    def inspect(self) -> Any:
        """Notes are not needed to read a checkpoint, and may be gone."""
        leaves = _inspect.inspect(self.steps)[0].leaves
        return [leaf._replace(role=None) for leaf in leaves]

    def export(self) -> Any:
        (path,), _ = _export.export_weights(
            self.steps, self.out / "out.safetensors", overwrite=True
        )
        return as_ours(path)

    def import_(self) -> Any:
        self.num += 1
        _import.import_weights(self.index, self.out / f"ck{self.num}", prefix="")
        checkpoint, out = self.out / f"ck{self.num}", self.out / "out.safetensors"
        (path,), _ = _export.export_weights(checkpoint, out, select="", overwrite=True)
        return as_ours(path)

    def _values(self, state: Any) -> list[Any]:
        return [np.asarray(x).tolist() for x in jax.tree.leaves(self.train_step.unshard(state))]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return Files(tmp_path_factory.mktemp("files"))


READERS: list[tuple[str, str, int]] = [
    ("1/state/_METADATA", "restore", 40),
    ("1/state/_METADATA", "restore_latest", 10),
    ("1/state/_METADATA", "inspect", 40),
    ("1/state/_METADATA", "export", 40),
    ("1/_CHECKPOINT_METADATA", "restore_latest", 30),
    ("1/_CHECKPOINT_METADATA", "inspect", 40),
    ("1/_CHECKPOINT_METADATA", "export", 40),
    ("1/data/metadata", "restore_latest", 40),
    ("../out/i.json", "import_", 50),
]


@pytest.mark.filterwarnings("ignore:.* 1 does not count as a step")
@pytest.mark.parametrize(("path", "reader", "num"), READERS)
def test_mutated_json(path, reader, num, files):
    """330 files in all: an error of ours, or what the whole one says.

    A latest step of which the files do not add up is none, and a warning says so.
    """
    rng, timed, file = random.Random(f"{path} {reader}"), Timed(), files.steps / path
    whole = file.read_bytes()
    expected = getattr(files, reader)()
    wrong: collections.Counter[str] = collections.Counter()
    for _ in range(num):
        data = mutated(rng, whole)
        file.write_bytes(data)
        try:
            found = timed(getattr(files, reader))
            if not isinstance(found, jzero.CheckpointError) and found != expected:
                wrong[f"another value, of {data[:300]!r}"] += 1
        except Exception as error:
            wrong[f"{type(error).__name__}: {str(error)[:80]}, of {data[:300]!r}"] += 1
        finally:
            file.write_bytes(whole)
    assert not wrong, f"{sum(wrong.values())} of {num}:\n" + "\n".join(wrong)
    assert timed.worst < SECONDS
    assert getattr(files, reader)() == expected


def test_no_error_is_left_unnamed(files):
    """The file that is wrong is in the message."""
    whole = files.index.read_bytes()
    files.index.write_bytes(b"[1, 2")
    with pytest.raises(
        jzero.CheckpointError, match=r"import .*/i\.json: it is not JSON: Expecting"
    ):
        files.import_()
    files.index.write_bytes(whole)


# What is no regular file, in the places of the files of a directory of steps and of a checkpoint.


@pytest.mark.parametrize(
    ("put", "text"),
    [
        (os.mkfifo, "a pipe"),
        (pathlib.Path.mkdir, "a directory"),
        (lambda path: path.symlink_to("nowhere"), "a link"),
        (lambda path: path.symlink_to("/dev/zero"), "a link"),
    ],
)
def test_locks_that_are_no_files(put, text, tmp_path, files):
    """A save is refused, within a second; nothing is removed."""
    put(lock := tmp_path / "_JZERO_WRITER")
    with (
        jzero.Checkpointer(tmp_path, files.train_step) as checkpointer,
        within(5),
        pytest.raises(
            jzero.CheckpointError, match=f"_JZERO_WRITER is {text}. A writer holds .* Remove it, if"
        ),
    ):
        checkpointer.save(1, new_state())
    assert os.path.lexists(lock)
    assert [path.name for path in tmp_path.iterdir()] == ["_JZERO_WRITER"]


def test_a_link_is_no_lock(tmp_path, files):
    """Not even one to the lock of a process that runs."""
    lock = tmp_path / "steps" / "_JZERO_WRITER"
    with jzero.Checkpointer(tmp_path / "steps", files.train_step) as checkpointer:
        checkpointer.save(1, new_state())
        checkpointer.wait()
        lock.rename(tmp_path / "moved")
        lock.symlink_to(tmp_path / "moved")
        with pytest.raises(jzero.CheckpointError, match="somebody has taken over"):
            checkpointer.save(2, new_state())
    (lock.parent / "_JZERO_WRITER.left").mkdir()
    lock.unlink()
    with jzero.Checkpointer(tmp_path / "steps", files.train_step) as checkpointer:
        assert checkpointer.save(3, new_state())


def test_a_link_is_no_folder_of_an_import(tmp_path):
    """It is not taken for what a killed import has left, and what it leads to stays."""
    save_file({"a": np.ones(2)}, tmp_path / "in.safetensors")
    (tmp_path / "other").mkdir()
    (tmp_path / ".ck.tmp-abcdefgh").symlink_to(tmp_path / "other")
    with pytest.raises(
        jzero.CheckpointError, match="another process is writing it, in .*remove that"
    ):
        _import.import_weights(tmp_path / "in.safetensors", tmp_path / "ck")
    assert (tmp_path / "other").is_dir()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever hangs is interrupted, and fails."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
