"""Groups of options: what each refuses by itself, and the new lines that old names are told."""

import dataclasses
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from jzero._options_of import options_of


def step_fn(params: Any, opt: Any, batch: Any) -> Any:
    return params, opt


def sum_step(params: Any, batch: Any) -> Any:
    return params + batch.sum()


ONES = np.ones(8, np.float32)
# Any: what is given here, a checker of types would refuse.
sharded: Any = jzero.shard_train_step
comm: Any = jzero.Comm
axes: Any = jzero.Axes
evaluation = jzero.shard_eval_step(step_fn)


OLD: dict[str, tuple[dict[str, Any], str]] = {
    "a group with what was given in a short form": (
        {"microbatches": 4, "reduce": "once"}, "microbatches=jzero.Microbatches(4, reduce='once')"),
    "a policy of its own": (
        {"memory": "host", "offload_params": jzero.PinnedHost()},
        "memory=jzero.Memory(optimizer='host', params=jzero.PinnedHost())"),
    "axes": ({"axes": "node", "param_axes": "node"}, "axes=jzero.Axes('node', params='node')"),
    "a group with a group": (
        {"comm": jzero.Comm(tile_bytes=1024), "gather_dtype": "int8"},
        "comm=jzero.Comm(tile_bytes=1024, gather_dtype='int8')"),
    "formats of several axes": (
        {"reduce_dtype": {"local": jnp.int8, "node": jzero.Blocks("int4", rotate=True)}},
        "comm=jzero.Comm(reduce_dtype={'local': jnp.int8, "
        "'node': jzero.Blocks(jnp.int4, size=128, rotate=True)})"),
    "dtypes of NumPy": (
        {"accumulate": 4, "accumulate_dtype": np.dtype("float32")},
        "microbatches=jzero.Microbatches(4, dtype=jnp.float32)"),
    "one policy": ({"offload": jzero.HostCPU(ratio=0.5)}, "memory=jzero.HostCPU(ratio=0.5)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_old_names_are_told_the_new_line(name):
    given, line = OLD[name]
    with pytest.raises(jzero.OptionError, match=re.escape(f"Write {line}.")):
        sharded(step_fn, **given)
    eval(
        f"jzero.shard_train_step(step_fn, {line})", {"jzero": jzero, "jnp": jnp, "step_fn": step_fn}
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"state_argnums": 0, "state_argnames": "opt"}, "Write state=(0, 'opt')."),
        ({"state_argnums": (0, 1), "state_argnames": ()}, "Write state=(0, 1)."),
        ({"state_argnames": "opt"}, "Write state='opt'."),
        ({"state_argnames": ()}, "no option state_argnames=. Drop it."),
    ],
)
def test_positions_and_names_of_the_state_are_one_option(given, text):
    with pytest.raises(jzero.OptionError, match=re.escape(text)):
        sharded(step_fn, **given)


REFUSED: dict[str, tuple[Any, str]] = {
    "a dtype that JAX has not": (lambda: jzero.Microbatches(4, dtype=float), "without jax_enable_x64"),
    "... of reductions": (lambda: jzero.Comm(reduce_dtype=float), "without jax_enable_x64"),
    "a dtype that is no float": (lambda: jzero.Microbatches(4, dtype="i8"), "Gradients are floating point"),
    "a field that is misspelt": (
        lambda: comm(gather_dtyp="int8"), "there is no field gather_dtyp=. Did you mean gather_dtype=?"),
    "a field of another group": (
        lambda: axes(microbatches=4), "Its fields are batch, params, optimizer, axis_name, auto_specs"),
    "a bound of leaves that are not sharded anyway": (
        lambda: sharded(step_fn, stage=0, axes=axes(min_shard_bytes=8)), "At stage 0 nothing is sharded"),
    "the axis of a step that names none": (
        lambda: sharded(sum_step, axes=jzero.Axes(axis_name="batch")).plan(ONES, ONES),
        "shard_train_step: Axes(axis_name='batch'), and the step has no collectives over it"),
    "no bound at all": (lambda: comm(max_gather_bytes=None), "max_gather_bytes=None"),
    "a format by axis": (lambda: jzero.Comm(gather_dtype={"data": "int8"}), "It is a quantized format"),
    "axes as a dict": (lambda: axes({"data": 3}), "A mesh axis is called by a text"),
    "axes of another group": (
        lambda: sharded(step_fn, axes=jzero.Memory()), "batch=Memory"),
    "a class of policies": (
        lambda: sharded(step_fn, memory=jzero.HostCPU), "or a jzero.Memory"),
    "a group of another": (
        lambda: sharded(step_fn, comm=jzero.Memory()), "It is a jzero.Comm"),
    "a state by a number that is no position": (
        lambda: sharded(step_fn, state=1.0), "state names 1.0"),
    "a state by a bool": (lambda: sharded(step_fn, state=True), "state names True"),
    "a state in a dict": (
        lambda: sharded(step_fn, state={"params": 5}), "state names {'params': 5}"),
    "two specs of one argument": (
        lambda: sharded(step_fn, in_specs={"batch": jax.P(), 2: jax.P()}), "names an argument twice"),
    "a mesh whose axes have no names": (
        lambda: jzero.estimate("7B", devices={5: 2}), "does not map names of axes"),
    "an evaluation that quantizes gathers": (
        lambda: evaluation.with_comm(jzero.Comm(gather_dtype="int8")), "It is for training"),
    "an evaluation that saves for no backward pass": (
        lambda: evaluation.with_comm(jzero.Comm(gather="keep")), "no backward pass"),
    "an evaluation like an evaluation": (
        lambda: jzero.shard_eval_step(step_fn, like=evaluation), "like is an evaluation"),
    **{
        f"an estimate with {given!r}": (
            lambda given=given: jzero.estimate("7B", devices=8, **given), "Numbers alone do not say")
        for given in ({"axes": "nope"}, {"axes": axes(replicate=".*")}, {"comm": comm(prefetch_bytes=8)})
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_have_no_effect_or_no_meaning_is_refused(name):
    make, text = REFUSED[name]
    with pytest.raises(jzero.JzeroError, match=re.escape(text)):
        make()


def test_groups_show_their_fields():
    for group in (jzero.Comm, jzero.NVMe, jzero.Blocks):
        names = [x.name for x in dataclasses.fields(group)]
        assert list(inspect.signature(group).parameters) == names
        assert list(group.__signature__.parameters) == names  # what Sphinx asks for


def test_numbers_of_numpy():
    step = sharded(step_fn, state=np.int64(0), microbatches=np.int32(2))
    assert step._programs.signature.state_names == ("params",)
    assert step._programs.options.microbatches == jzero.Microbatches(2)
    assert jzero.estimate("7B", devices=np.int64(8)).num_devices == 8


def test_groups_are_values():
    """They can be compared, hashed, and used for several steps."""
    group = jzero.Axes(["node", "local"], params="local", auto_specs={"w": jax.P("model")})
    again = jzero.Axes(("node", "local"), params=("local",), auto_specs={"w": jax.P("model")})
    assert group == again
    assert hash(group) == hash(again)
    groups = {
        jzero.Microbatches(2, dtype=x) for x in ("bfloat16", jnp.bfloat16, np.dtype("bfloat16"))
    }
    assert len(groups) == 1
    assert repr(groups.pop()) == "Microbatches(num=2, dtype='bfloat16')"
    options = [
        options_of("f", 3, 2, jzero.Memory(optimizer="host"), None, x) for x in (group, again)
    ]
    assert options[0] == options[1]
    assert hash(options[0]) == hash(options[1])
    assert repr(group) == (
        "Axes(batch=('node', 'local'), params=('local',), auto_specs=(('w', P('model',)),))"
        if "P('model',)" in repr(jax.P("model")) else repr(again))  # fmt: skip
