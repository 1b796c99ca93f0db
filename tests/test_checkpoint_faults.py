"""Damaged, wrong and unwritable checkpoints: a clear error each, and what was complete stays complete."""

import contextlib
import pathlib
import random
import shutil
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tensorstore

import jzero
from jzero.checkpoint import _inspect, _reading, _stored, _writing
from jzero.weights import _export


def step_fn(state, batch):
    grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
    return {
        **state,
        "w": state["w"] - 0.1 * grads,
        "mu": state["mu"] + grads,
        "count": state["count"] + 1,
    }


def new_state(rows: int = 100) -> dict[str, jax.Array]:
    w = jax.random.normal(jax.random.key(0), (rows, 24))
    return {"w": w, "mu": w + 1, "count": jnp.int32(3)}


@pytest.fixture(scope="module")
def train_step():
    return jzero.shard_train_step(step_fn)


@pytest.fixture
def saved(train_step, tmp_path) -> pathlib.Path:
    """Steps 1 and 2, the second to be damaged."""
    with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, new_state())
    return tmp_path / "steps"


def restore(directory, train_step, step=None, state=None):
    with jzero.Checkpointer(directory, train_step) as checkpointer:
        return checkpointer.restore(new_state() if state is None else state, step=step)


def assert_restored(state) -> None:
    for name, expected in new_state().items():
        np.testing.assert_array_equal(state[name], expected)


def data_files(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold chunks of leaves, by size."""
    files = [path for path in directory.rglob("d/*") if path.is_file()]
    return sorted(files, key=lambda path: path.stat().st_size)


def save(checkpointer: jzero.Checkpointer, *steps: int) -> None:
    """Each is complete."""
    for step in steps:
        checkpointer.save(step, new_state())
        checkpointer.wait()


def refused(text: str) -> Any:
    return pytest.raises(jzero.CheckpointError, match=text)


class Place:
    """A data iterator's."""

    def __init__(self, at: int):
        self.at = at

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def is_found(step: pathlib.Path) -> bool:
    """Whether `inspect --verify` finds damage."""
    try:
        return bool(_inspect.verify(_inspect.inspect(step)[1]).damaged)
    except jzero.CheckpointError:
        return True


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bits_are_found(seed, train_step, tmp_path):
    """In any file: an error, or nothing that matters was hit; never another value, or place in the data.

    Of files that are not data every bit matters to `inspect --verify`.
    """
    mixed = {**new_state(), "host": np.arange(150.0).reshape(3, 50), "rate": 0.5, "num": 12}
    with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpointer:
        checkpointer.save(2, mixed, Place(7))
    rng = random.Random(seed)

    def read():
        place = Place(0)
        with jzero.Checkpointer(tmp_path / "steps", train_step) as checkpointer:
            state = checkpointer.restore(mixed, step=2, data_iterator=place)
        assert place.at == 7
        for name, expected in mixed.items():
            np.testing.assert_array_equal(state[name], expected)
        out = tmp_path / "out.safetensors"
        _export.export_weights(tmp_path / "steps" / "2", out, select=".", overwrite=True)
        tensors = safetensors.numpy.load_file(out)
        for name, expected in mixed.items():
            np.testing.assert_array_equal(tensors[name], expected)

    read()
    for path in sorted(path for path in (tmp_path / "steps").rglob("*") if path.is_file()):
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        with contextlib.suppress(jzero.CheckpointError):
            read()
        if path.parent.name != "d":
            assert is_found(tmp_path / "steps" / "2"), path
        path.write_bytes(whole)
    read()


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("values", [[3.0], np.arange(90) % 7, np.sin(np.arange(64.0))], ids=len)
def test_every_bit_of_a_chunk(checksum, values):
    """An error or the same value; without the checksum, another value."""
    values = np.asarray(values, np.float32)
    metadata = {**_writing.metadata(values.shape, values.shape), "data_type": "float32"}
    metadata["codecs"][1]["configuration"]["checksum"] = checksum
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "metadata": metadata}
    store = tensorstore.open(spec, create=True).result()
    store.write(values).result()
    files: Any = store.kvstore
    whole, wrong = files.read("c/0").result().value, 0
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        files.write("c/0", bytes(flipped)).result()
        with contextlib.suppress(ValueError):
            wrong += not np.array_equal(store.read().result(), values)
    assert (wrong == 0) is checksum


def test_damage_names_the_leaf_and_spares_the_step_before(saved, train_step):
    largest = data_files(saved / "2")[-1]
    data = bytearray(largest.read_bytes())
    for at in range(len(data) // 8, len(data), len(data) // 8):
        data[at] ^= 1
    largest.write_bytes(data)
    with refused(r"(?s)steps/2/state: 2 leaves fail.*mu.*w"):
        restore(saved, train_step)
    assert_restored(restore(saved, train_step, step=1))


@pytest.mark.parametrize("keep", [0, 0.5])
def test_truncated_files(keep, saved, train_step):
    for path in data_files(saved / "2"):
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * keep)])
    with refused("bytes. Its files are damaged"):
        restore(saved, train_step, step=2)
    with pytest.warns(
        match="steps: 2 does not count as a step: .* bytes. What is not whole is left"
    ):
        assert_restored(restore(saved, train_step))


@pytest.mark.parametrize("sealed", [True, False])
def test_missing_files(sealed, saved, train_step):
    """The step before is the latest one then; that the last does not count is said once."""
    if not sealed:  # as jzero wrote steps before it sealed them
        (saved / "2" / "_JZERO_SEAL").unlink()
    for name in ("manifest.ocdbt", "_METADATA"):
        (saved / "2" / "state" / name).unlink()
        with refused(f"{name} is missing.*Its files are damaged, inc"):
            restore(saved, train_step, step=2)
        with pytest.warns(match=f"steps: 2 does not count as a step: .*{name} is missing"):
            assert_restored(restore(saved, train_step))
        with jzero.Checkpointer(saved, train_step) as checkpointer:
            assert (checkpointer.latest_step(), checkpointer.steps()) == (1, [1])
    with refused("has a file _METADATA"):
        jzero.restore(saved / "2", train_step, new_state())


def test_another_model(saved, train_step):
    wrong = {
        "w": jnp.zeros((101, 24)),
        "mu": jnp.zeros((100, 24), jnp.bfloat16),
        "nu": jnp.zeros((2, 2)),
    }
    with pytest.raises(jzero.CheckpointError) as caught:
        restore(saved, train_step, state=wrong)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("steps/2/state: 4 leaves fail:")
    assert lines[1:5] == [
        "  - state['mu'] bfloat16[100,24] is float32[100,24] in the checkpoint",
        "  - state['nu'] float32[2,2] is not in the checkpoint",
        "  - state['w'] float32[101,24] is float32[100,24] in the checkpoint",
        "  - count int32[] is in the checkpoint only",
    ]
    assert "Use the model and optimizer that it was saved with" in lines[5]


def test_no_checkpoint(train_step, tmp_path):
    with refused("there is no directory"):
        jzero.restore(tmp_path / "nowhere", train_step, new_state())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "readme.txt").write_text("hello")
    with refused(r"has readme.txt\."):
        jzero.restore(tmp_path / "other", train_step, new_state())


def test_never_finished(saved, train_step):
    unfinished = saved / "3.orbax-checkpoint-tmp"
    shutil.copytree(saved / "2", unfinished)
    with refused("was never finished"):
        jzero.restore(unfinished, train_step, new_state())
    with jzero.Checkpointer(saved, train_step) as checkpointer:
        assert checkpointer.latest_step() == 2
        assert unfinished.exists()  # Another process may be writing it.
        checkpointer.save(4, new_state())
    assert sorted(path.name for path in saved.iterdir()) == ["1", "2", "4"]


def test_wrong_arguments(saved, train_step):
    with pytest.raises(jzero.OptionError, match="train_step is a function"):
        jzero.restore(saved / "2", step_fn, new_state())  # type: ignore[arg-type]
    with jzero.Checkpointer(saved, train_step) as checkpointer:
        with pytest.raises(jzero.OptionError, match=r"is a list without get_state\(\)"):
            checkpointer.save(3, new_state(), [1, 2])
        with refused("was saved without a data iterator"):
            checkpointer.restore(new_state(), data_iterator=NoPlace())
        state = train_step.shard(new_state())
        train_step(state, jnp.ones((8, 100)))
        with pytest.raises(jzero.StateError, match="already donated"):
            checkpointer.save(3, state)
        assert checkpointer.latest_step() == 2


def test_steps_in_order(saved, train_step):
    with jzero.Checkpointer(saved, train_step) as checkpointer:
        assert_restored(checkpointer.restore(new_state()))
        assert not checkpointer.save(2, new_state(), force=True)  # It is there.
        checkpointer.restore(new_state(), step=1)
        with refused("step 2 is not after step 2 .* remove the dir"):
            checkpointer.save(2, new_state())


@pytest.mark.parametrize("state", [{0: 5}, {"a": (1, 2)}, {"a": float("inf")}])
def test_iterators_that_json_would_change(state, saved, train_step):
    class Iterator:
        def get_state(self):
            return state

    with jzero.Checkpointer(saved, train_step) as checkpointer:
        with pytest.raises(jzero.OptionError, match="saved as JSON, and must come back as it was"):
            checkpointer.save(3, new_state(), Iterator())
        assert checkpointer.latest_step() == 2


def test_sigterm_is_given_back(saved, train_step):
    before = signal.getsignal(signal.SIGTERM)
    first, second = (jzero.Checkpointer(saved, train_step) for _ in range(2))
    assert not first.preempted(1)
    assert not second.preempted(1)
    signal.raise_signal(signal.SIGTERM)
    assert first.preempted(2)
    assert second.preempted(2)
    first.close()
    second.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_leaves_of_one_name(train_step, tmp_path):
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        with pytest.raises(jzero.StateError, match="the leaves c/d and c.d have one name"):
            checkpointer.save(1, {"c": {"d": jnp.zeros(3)}, "c.d": jnp.ones(3)})
        with pytest.raises(jzero.StateError, match="the leaves c/d and c/d have one name"):
            checkpointer.save(1, {"c": {"d": jnp.zeros(3)}, "c/d": jnp.ones(3)})
        assert checkpointer.latest_step() is None


class NoPlace:
    def set_state(self, state):
        raise AssertionError


def test_unwritable_directory(train_step, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "steps", pathlib.Path("/proc/steps")):
        with refused("could not be opened: .*Error"):
            jzero.Checkpointer(path, train_step)


def test_an_error_of_the_devices_is_no_damage(tmp_path):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    text = _stored.damaged(
        "restore", tmp_path, _reading.LeafErrors({"w": full, "mu": MemoryError()})
    )
    assert "w: JaxRuntimeError: RESOURCE_EXHAUSTED" in text
    assert "Nothing is wrong with its files" in text
    assert "damaged" not in text
    text = _stored.damaged("restore", tmp_path, _reading.LeafErrors({"w": full, "mu": OSError()}))
    assert "Its files are damaged" in text


def test_wrong_arguments_are_named(train_step, tmp_path):
    with pytest.raises(jzero.OptionError, match=r"Write jzero.Checkpointer\(directory, train_step"):
        jzero.Checkpointer(train_step, str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(
        jzero.OptionError, match="(?s)3 arguments fail.*function.*keep is 0.*steps is 0"
    ):
        jzero.Checkpointer(tmp_path, step_fn, max_to_keep=0, save_interval_steps=0)  # type: ignore[arg-type]
    with jzero.Checkpointer(tmp_path, train_step) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer in {tmp_path} for {train_step!r}>"
        for step in (None, 3):
            with refused(r"nothing was saved in.*init\(init_fn, key\)"):
                checkpointer.restore(new_state(), step=step)
        checkpointer.save(1, new_state())
        advice = r"state is the function new_state.*jax.eval_shape\(new_state, ...\)"
        with refused(f"Checkpointer.restore: {advice}"):
            checkpointer.restore(new_state)
    with refused(f"^restore: {advice}"):
        jzero.restore(tmp_path / "1", train_step, new_state)
