"""Activations that wait on the host for the backward pass: the same training, and types say where."""

import collections
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jzero
import samples
import small
import zoo
from jzero.ir._regions import variables
from jzero.offload.execute._executor import Execution
from jzero.offload.schedule._ops import value_of
from jzero.segments import _programs
from jzero.sharding.analysis import _residuals
from jzero.sharding.cut import _layer_parts
from jzero.sharding.plan import _host_memory
from jzero.tracing import _jaxpr

LAYERS, WIDTH, ROWS, STEPS = 4, 16, 16, 4
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
BY_NAME = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=["kept"], names_which_can_be_offloaded=["moved"],
    offload_src="device", offload_dst="pinned_host",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """The models' values are small, so all that may wait on the host does, and little is on its way."""
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    monkeypatch.setattr(_residuals, "ON_THEIR_WAY", 4 * 2 * WIDTH)


def new_state():
    keys = jax.random.split(jax.random.key(0), 3)
    layers = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 2 * WIDTH)) / 4,
        "down": jax.random.normal(keys[1], (LAYERS, 2 * WIDTH, WIDTH)) / 6,
    }
    params = {"layers": layers, "head": jax.random.normal(keys[2], (WIDTH, WIDTH)) / 4}
    return {"params": params, "opt_state": TX.init(params)}


def block(x, w, key):
    x = checkpoint_name(x, "moved")
    hidden = checkpoint_name(jnp.tanh(x @ w["up"]), "kept")
    hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
    return x + hidden @ w["down"]


def make_step(scan, recompute="nothing"):
    """A residual MLP with dropout; `recompute` is what of a layer the backward pass computes again."""
    layer = {
        "nothing": block,
        "blocks": jax.checkpoint(block, prevent_cse=not scan),
        "by name": jax.checkpoint(block, prevent_cse=not scan, policy=BY_NAME),
        "apart, by name": jax.checkpoint(block, policy=BY_NAME),
    }[recompute]

    def loss_fn(params, x, key):
        keys = jax.random.split(key, LAYERS)
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, *w), None), x, (params["layers"], keys))
        else:
            layers = params["layers"]
            for up, down, key in zip(layers["up"], layers["down"], keys, strict=True):
                x = layer(x, {"up": up, "down": down}, key)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(state, x, key):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], x, key)
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
        }, loss

    return step


def batches():
    return [
        (jax.random.normal(jax.random.key(i), (ROWS, WIDTH)), jax.random.key(100 + i))
        for i in range(STEPS)
    ]


@functools.cache
def one_device(scan, recompute):
    """The state after the last step, and the losses."""
    state, losses = new_state(), []
    step = jax.jit(make_step(scan, recompute))
    for batch in batches():
        state, loss = step(state, *batch)
        losses.append(loss)
    return jax.device_get((state, losses))


ON_HOST: dict[str, Any] = {"offload_activations": jzero.PinnedHost()}
BOTH: dict[str, Any] = {"offload_params": jzero.PinnedHost(device_bytes=2**14), **ON_HOST}


def sharded(scan, recompute="blocks", **options):
    step = make_step(scan, recompute)
    return small.shard_train_step(step, in_specs={"key": jax.P()}, **options)


def assert_trains_as_one_device(scan, recompute, axes=None, **options):
    """On a mesh every leaf and loss is one device's."""
    mesh = small.mesh(**axes or {"data": 8})
    train_step = sharded(scan, recompute, mesh=mesh, **options)
    state, losses = train_step.shard(new_state(), *batches()[0]), []
    for batch in batches():
        state, loss = train_step(state, *batch)
        losses.append(loss)
    state = train_step.unshard(state)
    expected = one_device(scan, recompute)
    zoo.assert_trees_close(jax.device_get((state, losses)), expected, zoo.FP32, "")
    return train_step


WRITTEN = list(itertools.product([True, False], ["nothing", "blocks"]))
NAMES = ["scanned", "scanned, remat", "unrolled", "unrolled, remat"]
written = pytest.mark.parametrize(("scan", "recompute"), WRITTEN, ids=NAMES)
two_written = pytest.mark.parametrize(("scan", "recompute"), WRITTEN[1:3], ids=NAMES[1:3])


@pytest.mark.slow(but=[3])
@two_written
@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2},
        {"accumulate": 2, "stage": 1},
        {"gather": "keep"},
        {"prefetch_bytes": 0},
        {"axes": {"node": 2, "local": 4}, "param_axes": "local"},
        {"offload": jzero.PinnedHost()},
        {"offload": jzero.HostCPU(), "accumulate": 2},
    ],
    ids=str,
)
def test_with_other_options(scan, recompute, options):
    assert_trains_as_one_device(scan, recompute, **ON_HOST, **options)


@pytest.mark.parametrize(("scan", "recompute"), [(True, "nothing"), (False, "blocks")])
def test_one_device_moves_what_each_of_two_does(scan, recompute):
    """Though nothing differs between devices there."""
    plans = []
    for num in (1, 2):
        train_step = assert_trains_as_one_device(scan, recompute, {"data": num}, **ON_HOST)
        state, batch = new_state(), batches()[0]
        plans.append(train_step.describe(state, *batch).plan.activations)
    one, two = plans
    assert one
    assert [x._replace(shape=(), nbytes=0) for x in one] == [
        x._replace(shape=(), nbytes=0) for x in two
    ]


# -- where they are ------------------------------------------------------------------------------------


def traced(train_step):
    call = train_step._programs.bind((new_state(), *batches()[0]), {})
    program = train_step._programs.of(call)
    # Around a call of the step itself there is a custom_jvp, which JAX's newest form of it hides.
    return jax.make_jaxpr(program.step.run)(*_programs.stored_inputs(call, program))


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jaxpr.inner_jaxprs(eqn):
            yield from equations(_jaxpr.open_jaxpr(inner)[0])


def loops_on_host(jaxpr):
    """Of each loop: shapes on the host that it takes and returns."""
    loops = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "scan"]
    return [[shapes_on_host(e.invars), shapes_on_host(e.outvars)] for e in loops]


def shapes_on_host(atoms):
    return [atom.aval.shape for atom in atoms if _jaxpr.is_on_host(atom.aval)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stacks_are_on_the_host_between_the_loops(stage):
    """One stack, of block inputs; the forward loop makes it there, the backward loop reads it there."""
    train_step = sharded(True, stage=stage, **ON_HOST)
    stack = (LAYERS, ROWS // 8, WIDTH)
    forward, backward = loops_on_host(traced(train_step))
    assert forward[1] == [stack]
    assert stack in backward[0]
    head_input, row = train_step.plan(new_state(), *batches()[0]).activations
    assert (head_input.shape, head_input.iterations) == ((ROWS // 8, WIDTH), 1)
    assert (row.shape, row.iterations, row.times, row.nbytes) == (stack, LAYERS, 1, 4 * 4 * 2 * 16)


def test_an_iteration_fetches_for_the_next_one():
    """What a backward iteration computes with comes out of its carry, not out of the host's stack."""
    train_step = sharded(True, stage=2, **ON_HOST)
    loops = [e for e in equations(traced(train_step).jaxpr) if e.primitive.name == "scan"]
    body = _jaxpr.scan_parts(loops[1]).body
    fetched = [e.outvars[0] for e in body.eqns
               if _jaxpr.changes_memory(e) and not _jaxpr.is_on_host(e.outvars[0].aval)]  # fmt: skip
    assert [var.aval.shape for var in fetched] == [(ROWS // 8, WIDTH)]
    read = {atom for e in body.eqns for atom in e.invars if not _jaxpr.is_literal(atom)}
    assert fetched[0] not in read
    assert fetched[0] in body.outvars


@pytest.mark.slow
def test_the_pass_is_printed():
    train_step = sharded(True, **ON_HOST)
    program = functools.partial(train_step.program, new_state(), *batches()[0])
    assert "<host>" not in str(program(after="tiles"))
    assert "<host>" in str(program(after="activations"))


@pytest.mark.parametrize("limit", [0, 2**30], ids=["one on its way", "all on their way"])
def test_values_wait_for_those_before(monkeypatch, limit):
    """What an unrolled forward pass goes on with waits for copies to the host, if they are many bytes."""
    monkeypatch.setattr(_residuals, "ON_THEIR_WAY", limit)
    train_step = sharded(False, **ON_HOST)
    jaxpr = train_step.program(new_state(), *batches()[0], after="activations").jaxpr
    barriers = [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]
    waits = [e for e in barriers if not _jaxpr.is_on_host(e.invars[0].aval)
             and shapes_on_host(e.invars[1:])]  # fmt: skip
    assert bool(waits) == (not limit)


@pytest.mark.slow
def test_small_ones_stay(monkeypatch):
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 4 * 2 * WIDTH + 1)  # A block input and a byte.
    train_step = assert_trains_as_one_device(True, "blocks", **ON_HOST)
    assert train_step.plan(new_state(), *batches()[0]).activations == ()
    text = str(train_step.describe(new_state(), *batches()[0]))
    assert "No activation is saved on the host" in text


@pytest.mark.slow
def test_a_stack_that_is_read_whole():
    """Both passes read it otherwise than slice by slice: it leaves as a value, when its loop is over."""

    def step(params, x):
        def loss_fn(params):
            def iteration(h, w):
                h = jnp.tanh(h @ w)
                return h, h

            _, stack = jax.lax.scan(iteration, x, params["layers"])
            return jnp.mean(jnp.tanh(stack @ params["head"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    keys = jax.random.split(jax.random.key(0))
    params = {"layers": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 4,
              "head": jax.random.normal(keys[1], (WIDTH, WIDTH)) / 4}  # fmt: skip
    x, _ = batches()[0]
    expected = jax.device_get(jax.jit(step)(params, x))
    for options in (BOTH, ON_HOST):
        train_step = small.shard_train_step(step, **options)
        stack, *_ = train_step.plan(params, x).activations
        assert (stack.shape, stack.iterations) == ((LAYERS, ROWS // 8, WIDTH), 1)
        params_there, loss = train_step(train_step.shard(params), x)
        found = train_step.unshard(params_there), loss
        zoo.assert_trees_close(jax.device_get(found), expected, zoo.FP32, "")


# -- beside parameters on the host -----------------------------------------------------------------------


def little_room(scan):
    # An unrolled layer may have to fetch its whole stack, to take a slice.
    return jzero.PinnedHost(device_bytes=9000 if scan else 10_000)


@pytest.mark.slow(but=["unrolled-apart, by name"])
@pytest.mark.parametrize("recompute", ["by name", "apart, by name"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_policies_of_the_step_beside_parameters(scan, recompute):
    for options in (BOTH, {"offload_params": BOTH["offload_params"]}):
        train_step = assert_trains_as_one_device(scan, recompute, **options)
        assert layered(train_step)._cut.waiting


def layered(train_step):
    call = train_step._programs.bind((new_state(), *batches()[0]), {})
    return train_step._programs.of(call).step.layered


@pytest.mark.slow
def test_coming_defaults_keep_what_waits():
    """JAX's own names of values become other equations."""
    with samples.switched_on("jax_remat3"):
        train_step = sharded(True, "blocks", **BOTH)
        assert layered(train_step)._cut.waiting


@pytest.mark.slow
@written
@pytest.mark.parametrize("little", [False, True], ids=["room for two", "little room"])
def test_what_crosses_beside_parameters_is_what_is_told(scan, recompute, little, monkeypatch):
    """Each residual leaves once and comes back once; none is left behind."""
    moved_bytes: collections.Counter[str] = collections.Counter()

    send, fetched = Execution._send, Execution._fetched

    def waits(moved):
        return value_of(moved.op.refs[0]).what == "activation"

    def counted_send(self, moved):
        found = send(self, moved)
        moved_bytes["to host"] += waits(moved) * sum(x.nbytes for x in found) // 8
        return found

    def counted_fetch(self, moved, known):
        found = fetched(self, moved, known)
        moved_bytes["to device"] += waits(moved) * sum(x.nbytes for x in found.values()) // 8
        return found

    monkeypatch.setattr(Execution, "_send", counted_send)
    monkeypatch.setattr(Execution, "_fetched", counted_fetch)
    options = BOTH | ({"offload_params": little_room(scan)} if little else {})
    train_step = sharded(scan, recompute, **options)
    state = train_step.shard(new_state(), *batches()[0])
    report = train_step.describe(state, *batches()[0])
    train_step(state, *batches()[0])
    told: collections.Counter[str] = collections.Counter()
    for x in report.transfers:
        if x.what == "activation":
            told[x.direction] += x.nbytes
    assert moved_bytes == told
    assert told["to host"] == told["to device"] > 0


@pytest.mark.slow
def test_no_program_makes_and_reads_what_waits():
    """However much room there is, an unrolled model's two passes are not in one program."""
    options = BOTH | {"offload_params": jzero.PinnedHost(device_bytes=2**30)}
    parts = layered(assert_trains_as_one_device(False, "blocks", **options)).parts
    waits = {var for var in _layer_parts.offloaded(parts) if var.aval.ndim}
    assert len(waits) == LAYERS
    for part in parts:
        assert waits.isdisjoint(
            {*part.outputs} & {*variables(a for e in part.eqns for a in e.invars)}
        )
        assert len(waits.intersection(part.reads)) <= 2  # A value is on its way, and one more.


# -- reports ---------------------------------------------------------------------------------------------


# -- a step's own policies -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["by name", "apart, by name"])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_policies_of_the_step(scan, recompute, stage):
    train_step = assert_trains_as_one_device(scan, recompute, stage=stage)
    assert "<host>" in str(traced(train_step))
    assert not train_step.describe(
        new_state(), *batches()[0]
    ).movements  # No rows are gathered for it.


@pytest.mark.slow(but=[3, 4])
@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize(
    "options",
    [{"accumulate": 2}, {"offload": jzero.PinnedHost()}, {"offload": jzero.HostCPU()},
     ON_HOST],
    ids=str,
)  # fmt: skip
def test_policies_of_the_step_with_other_options(scan, options):
    assert_trains_as_one_device(scan, "by name", **options)


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("pinned_host", "It is a policy: where activations wait for the backward pass"),
        (None, None),
        (jzero.NoOffload(), None),
        (jzero.HostCPU(), "reads and writes pinned memory of their host, and no other"),
        (jzero.PinnedHost(device_bytes=3), "What it sets is of optimizer state"),
    ],
    ids=str,
)
def test_the_policy(policy, text):
    if text is None:
        assert "<host>" not in str(traced(sharded(True, offload_activations=policy)))
        return
    with pytest.raises(jzero.OptionError, match="offload_activations=") as caught:
        sharded(True, offload_activations=policy)
    assert text in str(caught.value)
    assert "Use offload_activations=jzero.PinnedHost(), or drop it." in str(caught.value)


@pytest.mark.parametrize(
    ("recompute", "options", "error", "text"),
    [
        ("blocks", ON_HOST, jzero.OptionError,
         "Memory(activations=PinnedHost()) on GPUs with JAX "),
        ("by name", {}, jzero.StepError, "a loop makes float32[4, 16, 16] at "),
    ],
    ids=["the option", "a policy of the step"],
)  # fmt: skip
def test_gpus_of_which_xla_is_wrong(monkeypatch, recompute, options, error, text):
    """It trains wrong there without a word (XLA), so that it is refused."""
    monkeypatch.setattr(_host_memory, "RIGHT_SINCE", (99, 0))
    monkeypatch.setattr(_host_memory, "platform_of", lambda mesh: "gpu")
    train_step = sharded(True, recompute, **options)
    with pytest.raises(error, match=re.escape(text)) as caught:
        train_step.plan(new_state(), *batches()[0])
    assert "Use JAX 0.11.1 or newer" in str(caught.value)
    # Without stacks on the host nothing is refused.
    sharded(True).plan(new_state(), *batches()[0])


@pytest.mark.parametrize(
    ("options", "refused"),
    [({}, False), ({"accumulate": 2}, True)],
    ids=["iteration by iteration", "in microbatches"],
)
def test_gpus_of_which_xla_is_wrong_move_whole_arrays(monkeypatch, options, refused):
    """Layers that are programs of their own have no stack on the host within a program."""
    monkeypatch.setattr(_host_memory, "RIGHT_SINCE", (99, 0))
    monkeypatch.setattr(_host_memory, "platform_of", lambda mesh: "gpu")
    train_step = sharded(True, "blocks", **BOTH, **options)
    if not refused:
        assert train_step.plan(new_state(), *batches()[0]).activations
        return
    with pytest.raises(jzero.OptionError, match="on GPUs with JAX"):
        train_step.plan(new_state(), *batches()[0])


def test_the_platform_of_a_mesh():
    assert _host_memory.platform_of(small.mesh(data=8)) == "cpu"
    assert _host_memory.platform_of(jax.sharding.AbstractMesh((8,), ("data",))) == "cpu"
