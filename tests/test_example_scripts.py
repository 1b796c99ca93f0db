"""The scripts of examples/ at tiny size: they learn, a run that goes on is the same run, SIGTERM saves."""

import importlib.util
import pathlib
import re
import signal
import struct
import types
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tensorboardX.proto import event_pb2

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
TEXT = str(ROOT / "docs" / "*.py")
STEPS = 8
TINY = [f"--steps={STEPS}", "--batch-size=8", "--dim=32", "--layers=2", "--learning-rate=0.01",
        "--log-every=1", "--save-every=3", f"--text={TEXT}"]  # fmt: skip
GPT = [*TINY, "--heads=2", "--context=16", "--eval-batches=2"]
OPTIONS = {
    "linen_gpt": [*GPT, "--sample-bytes=8"],
    "nnx_gpt": [*GPT, "--sample-bytes=8", "--microbatches=1"],
    "lora_offload": [*GPT, "--rank=4", "--device-bytes=65536"],
    "pipeline_gpt": [*GPT, "--microbatches=2"],
    "finetune_llama": GPT,
    "clip_accumulate": [*TINY, "--length=16", "--microbatches=1", "--text=" + str(ROOT / "jzero/*.py")],
}  # fmt: skip
STAGES = {"pipeline_gpt": 2}  # devices that each part of the batch has


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(printed: str) -> dict[int, str]:
    """What a run printed of each step: all digits, so that equal is equal."""
    return {
        int(step): loss for step, loss in re.findall(r"^step +(\d+)  loss (\S+)", printed, re.M)
    }


def last_line(printed: str) -> str:
    """What the evaluation said."""
    return re.findall(r"^held.out.*$", printed, re.M)[-1]


def saved(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """The leaves of the last step, read by Orbax alone."""
    tree = ocp.PyTreeCheckpointer().restore(folder.absolute() / str(STEPS) / "state")
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)
    }


def logged(folder: pathlib.Path) -> dict[int, float]:
    """The losses in files of TensorBoard: records of a length, its checksum, an event, and its checksum."""
    found = {}
    for path in folder.iterdir():
        data = memoryview(path.read_bytes())
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event = event_pb2.Event.FromString(bytes(data[12 : 12 + length]))
            for value in event.summary.value:
                found[event.step] = value.simple_value
            data = data[16 + length :]
    return found


def told_to_end(at: int, text: np.ndarray, step: int, args: Any) -> tuple[Any, ...]:
    if step == at:
        signal.raise_signal(signal.SIGTERM)
    return text, step, args


@pytest.mark.slow(but=["finetune_llama"])
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem) for path in SCRIPTS],
)
def test_trains_stops_and_goes_on(path, tmp_path, capsys, monkeypatch):
    script, options = load(path.stem), OPTIONS[path.stem]

    def run(folder: str) -> str:
        with jax.numpy_rank_promotion("allow"):  # as for whoever copies it
            script.main([
                *options, f"--checkpoints={tmp_path / folder}", f"--logs={tmp_path / 'logs' / folder}",
            ])  # fmt: skip
        return capsys.readouterr().out

    whole = run("whole")
    found = [float(loss) for loss in losses(whole).values()]
    assert len(found) == STEPS
    assert np.mean(found[-2:]) < 0.99 * np.mean(found[:2])
    assert f"over {8 // STAGES.get(path.stem, 1)} devices" in whole

    rows = script.rows
    with (
        monkeypatch.context() as patched
    ):  # SIGTERM comes while the rows of the fifth step are read.
        patched.setattr(script, "rows", lambda *args: rows(*told_to_end(4, *args)))
        before = run("parts")
    assert "stopped after step 5; the same command goes on" in before
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {"3", "5"}
    for log in (tmp_path / "logs" / "parts").iterdir():
        log.rename(log.with_name("before"))  # tensorboardX names its file by the second
    after = run("parts")
    assert losses(before) | losses(after) == losses(whole)
    assert list(losses(after)) == [6, 7, 8]
    assert logged(tmp_path / "logs" / "parts") == {
        step: pytest.approx(float(loss), rel=1e-6) for step, loss in losses(whole).items()
    }
    assert last_line(after) == last_line(whole)
    expected, leaves = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    assert expected.keys() == leaves.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(leaves[name], leaf, err_msg=name)


@pytest.mark.slow
def test_lora_trains_on_what_linen_gpt_has_saved(tmp_path, capsys):
    """The base comes from there, stays as it is, and is on the hosts."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    with jax.numpy_rank_promotion("allow"):
        load("linen_gpt").main([*OPTIONS["linen_gpt"], f"--checkpoints={base}"])
        state = f"--base={base / str(STEPS) / 'state'}"
        load("lora_offload").main([*OPTIONS["lora_offload"], f"--checkpoints={tuned}", state])
    printed = capsys.readouterr().out
    assert re.search(r"\d+ of \d+ leaves are stored in pinned_host memory", printed)
    params = {name: x for name, x in saved(base).items() if name.startswith("['params']")}
    leaves = saved(tuned)
    assert len(params) == 16
    for name, leaf in params.items():
        np.testing.assert_array_equal(leaves[name.replace("params", "base", 1)], leaf, err_msg=name)
    ups = [x for name, x in leaves.items() if name.startswith("['lora']") and "['up']" in name]
    assert all(np.any(up != 0) for up in ups)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_fits_on_three_screens(path):
    # A Llama whose modules have Hugging Face's names takes one screen more.
    most = 208 if path.stem == "finetune_llama" else 150
    assert len(path.read_text().splitlines()) <= most
    assert path.stem in OPTIONS
    assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text()
