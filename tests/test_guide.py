"""The guide: its programs run, the rules that it quotes are printed; the reference has all public names."""

import pathlib
import re
import runpy
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PROGRAMS = [
    path
    for folder in ("guide", "migrate")
    for path in sorted((DOCS / folder).glob("*.md"))
    if re.search(r"^```python$", path.read_text(), re.MULTILINE)
]


def programs(page: str) -> str:
    """The Python of a page, but for what is marked as a part of something larger."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))


@pytest.mark.slow(but=[0, 1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize(
    "path", [p for p in PROGRAMS if p.parent.name == "guide"], ids=lambda p: p.stem
)
def test_programs_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # As for whoever copies it.
        # In a file: Grain reads the source of functions that it is given.
        program = tmp_path / f"{path.stem}.py"
        program.write_text(programs(path.read_text()))
        exec(compile(program.read_text(), str(program), "exec"), {"__name__": "__main__"})


@pytest.mark.slow
def test_keys_are_those_that_pmap_would_give():
    """The last programs of the page run; `jax.pmap` has `key` for `key[0]`, and folds a key of all itself."""
    page = (DOCS / "migrate/pmap.md").read_text()
    of_devices, of_all = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[-2:]
    found: dict[str, Any] = {}
    exec(of_devices, found)
    expected = on_devices(of_devices.replace("key[0]", "key"), found["keys"])
    np.testing.assert_allclose(found["params"], expected[0], rtol=1e-6)
    exec(of_all, found)
    folded = "jax.random.fold_in(noise_key, jax.lax.axis_index('batch'))"
    of_all = of_devices.split("def ")[0] + of_all.replace(
        "jzero.fold_device_index(noise_key)", folded
    )
    keys = jnp.broadcast_to(jax.random.key(0), 8)
    expected, expected_keys = on_devices(of_all, keys)
    np.testing.assert_allclose(found["params"], expected[0], rtol=1e-6)
    assert (expected_keys == found["key"]).all()


def on_devices(program: str, keys: jax.Array) -> Any:
    """What the step of a program returns under `jax.pmap`."""
    found: dict[str, Any] = {}
    exec(program.split("sharded =")[0], found)
    params = jnp.broadcast_to(jnp.ones((4, 4)), (8, 4, 4))
    step = jax.pmap(found["train_step"], axis_name="batch")
    return step(params, jnp.ones((8, 2, 4)), keys)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.stem)
def test_programs_are_python(path):
    compile(programs(path.read_text()), str(path), "exec")


def test_quoted_rules_are_what_is_printed():
    messages = (DOCS / "guide/planning.md").read_text().partition("\n## Messages\n")[2]
    quoted = re.findall(r'^\| "(.*?)" \| ', messages, re.MULTILINE)
    headers = messages.count("\n| rule |")
    assert headers == messages.count("\n### ")
    assert len(quoted) + 2 * headers == messages.count("\n| ")
    # Strings that stand side by side are one.
    code = "".join(path.read_text() for path in sorted((ROOT / "jzero").rglob("*.py")))
    code = re.sub(r'"\s*f?"', "", code)
    assert len(quoted) >= 20
    assert [rule for rule in quoted if rule not in code] == []


def test_the_reference_has_every_public_name():
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    names = {f"jzero.{name}" for name in dir(jzero) if name[0].isalpha()}
    names = {name for name in names if not hasattr(eval(name), "__path__")}
    names |= {"jzero.testing.assert_same_training", "jzero.testing.assert_collectives"}
    assert {name for name in names if not re.search(rf"{re.escape(name)}\b", pages)} == set()


def test_the_reference_has_what_steps_can_be_asked():
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    block = pages.split(".. autoclass:: jzero.ShardedStep\n")[1].split("```")[0]
    assert ":members:\n" in block


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse words its help otherwise")
def test_the_page_of_commands_is_what_its_script_writes():
    page = runpy.run_path(str(DOCS / "commands.py"))["page"]()
    assert (DOCS / "reference/commands.md").read_text() == page, "run `python docs/commands.py`"
