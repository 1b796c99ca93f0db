"""`train_step.program`: a step's jaxpr as text, with the user's lines, and leaves by name and layout."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
import small
from jzero import OptionError
from jzero.tracing import _jaxpr
from jzero.tracing._printed import Note, printed

TX = optax.adam(1e-2)
STATE = {"layers": jnp.ones((3, 8, 8)), "out": jnp.ones((8, 10))}
BATCH = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def layer(x, w):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ w), None


def loss_of(params, batch):
    x, _ = lax.scan(jax.checkpoint(layer), batch, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def step_fn(state, batch):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), (loss, batch)


def mesh(**sizes):
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))


def text_of(step=step_fn, state=None, batch=BATCH, **options: Any):
    train_step = small.shard_train_step(step, **{"mesh": mesh(data=8), **options})
    state = (STATE, TX.init(STATE)) if state is None else state
    return str(train_step.program(state, batch, after="trace"))


def line_of(text, part):
    (line,) = [line for line in text.splitlines() if part in line]
    return line


def test_the_text_says_what_the_jaxpr_says():
    program = small.shard_train_step(step_fn, mesh=mesh(data=8)).program(
        (STATE, TX.init(STATE)), BATCH, after="trace"
    )
    made = [line.split(" = ")[1] for line in str(program).splitlines() if " = " in line]
    names = {re.split(r"[\[ ]", line)[0] for line in made}
    assert {"scan", "dot_general", "tanh", "sqrt"} <= names
    assert {eqn.primitive.name for eqn in program.jaxpr.eqns} <= names
    # A name that is printed for an argument is the one that equations read.
    weights = line_of(str(program).split("  in\n")[0], "state[0]['out']").split(":")[0].strip()
    reads = [x for x in str(program).splitlines() if re.search(rf" {weights}(  +#|$)", x)]
    assert any(x.lstrip().startswith("] ") or "dot_general" in x for x in reads)
    assert repr(program).startswith("<PrintedProgram: step_fn, as traced")
    assert len(repr(program).splitlines()) == 1


def test_each_equation_has_the_users_line():
    text = text_of()
    here = r"# \S*test_program\.py:\d+:\d+"
    assert all("# " in line for line in text.splitlines() if " = " in line)
    first, _ = [line for line in text.splitlines() if "= tanh" in line]  # and once more, backward
    assert re.search(here + r" \(layer\), forward, mlp$", first)
    assert re.search(here + r" \(loss_of\), backward$", text, re.MULTILINE)
    # A library's line stands behind the user's that called it.
    roots = [line for line in text.splitlines() if "= sqrt" in line]
    pattern = r"# \S*test_program\.py:\d+ \(step_fn\), in optax/\S+ \("
    assert len(roots) == 2
    assert all(re.search(pattern, line) for line in roots)


@pytest.mark.slow
def test_layouts_of_padded_leaves_and_other_axes():
    def step_of(w, batch):
        grads = jax.grad(lambda w: jnp.sum(batch @ w["a"]) + jnp.sum(w["b"] ** 2))(w)
        return jax.tree.map(lambda w, g: w - g, w, grads)

    state = {"a": jnp.ones((8, 3)), "b": jnp.ones(10)}
    text = text_of(
        step_of,
        state,
        mesh=mesh(data=4, model=2),
        axis_names="data",
        auto_specs={r"\['a'\]": jax.P("model")},
    )
    top = text.split(". let")[0]
    assert "[8@model, 3+1@data]  parameter" in line_of(top, "state['a']")
    assert "[10+2@data]  parameter" in line_of(top, "state['b']")
    assert "layouts over the mesh (data: 4, model: 2)" in text
    top = text_of(step_of, state, batch=jnp.ones((6, 8))).split(". let")[0]
    assert "[6, 8]" in line_of(top, "# batch")  # The devices do not divide its rows.


def test_offloaded_leaves_say_where_they_rest():
    top = text_of(offload=jzero.HostCPU()).split(". let")[0]
    assert "optimizer state, in host" in line_of(top, "mu['out']")
    assert line_of(top, "state[0]['out']").endswith("parameter")


def test_a_step_with_collectives_is_one_devices():
    def step(w, batch):
        grad = lax.pmean(jax.grad(lambda w: jnp.sum(batch @ w))(w), "data")
        return w - grad, batch * 2

    text = text_of(step, jnp.ones((8, 8)), axis_name="data")
    assert "of one device" in text.splitlines()[0]
    assert re.search(r":f32\[2,8\] +# batch +\[16@data, 8\]", text)
    assert "# " in line_of(text, "= psum")
    assert re.search(r"# output\[1\] +\[16@data, 8\]", text)


def test_other_names_are_refused_with_those_that_there_are():
    train_step = small.shard_train_step(step_fn, mesh=mesh(data=8))
    with pytest.raises(OptionError, match=r"program\(after='optimize'\).*Write after='trace' or "):
        train_step.program((STATE, TX.init(STATE)), BATCH, after="optimize")
    with pytest.raises(ValueError, match="Write after='trace' or 'partition' or "):
        train_step.program((STATE, TX.init(STATE)), BATCH, after=None)


TABLE = np.arange(900.0)


def test_long_constants_and_parameters_are_cut():
    def step(w, batch):
        big = jnp.asarray(TABLE, jnp.float32)
        jax.debug.callback(lambda x, y: None, batch, big)
        return w - jax.grad(lambda w: jnp.sum(batch @ w) * jnp.sum(big * big[0]))(w)

    text = text_of(step, jnp.ones((8, 8)))
    assert re.search(r":f32\[900\] +# a constant", text)
    assert max(map(len, text.splitlines())) < 400
    assert "899" not in text


def test_programs_of_one_line_and_of_none():
    inner = jax.jit(lambda x: (x + 1) * 2)
    functions: list[Any] = [lambda x: x + 1, inner, lambda x: (x, 1.0), lambda x: x]
    for fn in functions:
        jaxpr = _jaxpr.trace_here(fn, jnp.ones(3)).jaxpr
        results = [Note(f"out{i}") for i in range(len(jaxpr.outvars))]
        lines = printed(jaxpr, [Note("x")], results).splitlines()
        assert lines[:3] == ["{ lambda", "    a:f32[3]  # x", "  . let"]
        assert [line.split("# ")[1] for line in lines[lines.index("  in") + 1 : -1]] == [
            note.name for note in results
        ]
    assert printed(_jaxpr.trace_here(lambda: None).jaxpr, [], []).splitlines() == [
        "{ lambda", "  . let", "  in", "}",
    ]  # fmt: skip


def test_a_function_that_both_passes_call_says_which_pass():
    def step(w, batch):
        act = jax.jit(lambda x: jnp.sin(x) * x, inline=False)
        loss = lambda w: jnp.sum(act(act(batch @ w)))  # noqa: E731
        return w - jax.grad(loss)(w), act(loss(w))

    text = text_of(step, jnp.ones((8, 8)))
    sines = [line for line in text.splitlines() if re.search(r"= (sin|cos) ", line)]
    assert any("forward" in line for line in sines)
    assert len(sines) >= 2
