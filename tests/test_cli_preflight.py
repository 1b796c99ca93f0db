"""`jzero preflight module:function`: what it prints, and what it says of what it cannot take."""

import json
import re
import sys

import jax
import jax.numpy as jnp
import pytest

import gpu_compiler
import jzero
from test_cli import output, run

TRAIN = """\
import functools
import jax, jax.numpy as jnp, jzero

def step_fn(w, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    return w - 0.1 * grad, loss

batch = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
setup = lambda: (step_fn, functools.partial(jnp.zeros, w.shape), batch)
stage_1 = lambda: (jzero.shard_train_step(step_fn, stage=1), w, batch)
nodes = lambda: (jzero.shard_train_step(step_fn, mesh=jax.make_mesh((2, 4), ("a", "b"))), w, batch)
alone = lambda: (step_fn,)
no_init = lambda: (step_fn, step_fn, batch)
bad_init = lambda: (step_fn, lambda: jnp.zeros(3) @ jnp.zeros(4), batch)
swapped = lambda: (lambda: w, step_fn, batch)
bug = lambda: (lambda w, batch: undefined_name, w, batch)

def fails():
    jnp.zeros(3) @ jnp.zeros(4)
"""


@pytest.fixture(autouse=True)
def train(tmp_path, monkeypatch):
    """A folder with train.py, where the command is typed."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "broken.py").write_text("x = 1\ny = (\n")
    (tmp_path / "needs.py").write_text("import no_such_package")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("train", "broken", "needs"):
        sys.modules.pop(name, None)


def refused(*arguments):
    done = run("preflight", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    return " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (":setup", "Write train:setup for setup of train.py."),
        ("./a/train.py:setup", "Write a.train:setup, a module from here."),
        ("no.such:setup", "there is no module no.such in "),
        ("needs:setup", "needs imports no_such_package, which is not installed."),
        ("broken:setup", "import of broken raises SyntaxError in line "),
        ("train:stup", "Did you mean train:setup?"),
        ("train:alone", "train:alone() returns a tuple of 1, not (step, init, batch)."),
        ("train:no_init", "init of train:no_init() takes the arguments (w, batch). It is MODULE:FUNCTION"),
        ("train:bad_init", "init of train:bad_init() raises TypeError in line "),
        ("train:swapped", "is no step of a state and the batch: it takes no arguments."),
        ("train:fails", "train:fails() raises TypeError in line 20 of "),
    ],
)  # fmt: skip
def test_a_function_that_is_none(function, text):
    assert text in refused(function)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--target", "h1000"), "jzero preflight: --target h1000. There are a100-40gb, "),
        (("--target", "mi300x"), "--target mi300x. No compiler for it is here"),
        (("--axes", "node=3"), "axes {'node': 3}, and 1 hosts of 8 devices."),
        (("--bandwidth", "fast"), "--bandwidth: 'fast' is not of the form node=100Gb/s,local=450GB/s"),
        (("--bandwidth", "data=0"), "--bandwidth: '0' along data. It is what a device sends, and "
         "receives, above 0, in bytes per second or in bits: '450GB/s', '100Gb/s'"),

        (("--search_batch",), "there is no --search_batch. Did you mean --search-batch?"),
        ((), "the following arguments are required"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_flags(flags, text):
    assert text in refused(*(["train:setup"] if flags else []), *flags)


@pytest.mark.slow
def test_advice_is_said_in_flags():
    """A dict is a flag's pairs."""
    said = refused("train:nodes", "--topology", "2x8")
    assert said.endswith("Pass --axes node=8,local=8, hosts first.")


@pytest.mark.slow
def test_what_to_install_where_nothing_compiles():
    """The tests' first environment has no compiler for GPUs; the library's error is the command's."""
    try:
        gpu_compiler.skip_without_it()
    except pytest.skip.Exception:
        assert "pip install 'jzero[preflight]'" in refused("train:setup")
    else:
        pytest.skip("there is a compiler")


def test_what_the_step_raises_has_its_line():
    gpu_compiler.skip_without_it()
    assert "the step of train:bug() raises NameError in line 17 of " in refused("train:bug")


def test_what_preflight_prints():
    gpu_compiler.skip_without_it()
    batch = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

    def step_fn(w, batch):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    for function, stage in (("train:setup", 3), ("train:stage_1", 1)):
        expected = jzero.preflight(
            jzero.shard_train_step(step_fn, stage=stage), w, batch, target="h100", topology="2x8",
            axes={"node": 2, "local": 8}, bandwidth={"node": "100Gb/s"}, memory_fraction=0.5,
        )  # fmt: skip
        flags = (
            "--target h100 --topology 2x8 --axes node=2,local=8 --bandwidth node=100Gb/s".split()
        )
        flags += ["--memory-fraction", "0.5"]
        text = output("preflight", function, *flags)
        took = r"compiled in \d+ s"
        assert re.sub(took, "", text) == re.sub(took, "", f"{expected}\n")
        found = json.loads(output("preflight", function, *flags, "--json"))
        assert found["step"]["stage"] == stage
        assert found["peak_bytes"] == expected.peak_bytes
