"""Layers with parameters on the hosts, for GPUs: copies run beside an iteration's products."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import gpu_compiler
import jzero
import small
from jzero.offload import _layer_programs
from jzero.preflight import _examined, _preflight, _schedule
from jzero.targets._target import Topology, find_target

gpu_compiler.skip_without_it()

WIDTH, LAYERS, ROWS = 1024, 5, 8 * 4096
H200 = find_target("test", "h200")


def step(state, x):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def block(x, w):
        w = jax.tree.map(lambda w: w.astype(jnp.bfloat16), w)
        return x + (jnp.tanh(x @ w["gate"]) * (x @ w["up"])) @ w["down"]

    def loss_fn(params):
        y, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return optax.apply_updates(state, jax.tree.map(lambda g: -0.1 * g, grads)), loss


def new_state():
    wide, narrow = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
    shapes = {"gate": wide, "up": wide, "down": narrow}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


@functools.cache
def layered():
    mesh = jzero.target_mesh("h200", "1x8")
    train_step = small.shard_train_step(
        step, mesh=mesh, memory=jzero.Memory(params=jzero.PinnedHost(device_bytes=2**30))
    )
    state = new_state()
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return mesh, train_step, state, x


@functools.cache
def iterations_beside_copies(known=True):
    """Texts of the iterations that fetch for the one after the next one, or store for the one before."""
    mesh, train_step, state, x = layered()
    there = train_step.on_mesh(mesh.abstract_mesh)
    parts = [
        p
        for p in _preflight._dispatches_of(there, state, x).programs
        if p.name == _layer_programs.ITERATION
    ]
    options = {"xla_gpu_autotune_level": 0} | (
        _layer_programs.options_of(_layer_programs.ITERATION, mesh) if known else {}
    )
    return [str(_examined._compiled(part.lower(mesh), options).as_text()) for part in parts]


def waited(text):
    """Seconds of copies from the host and to it, and those for which the device waits for them."""
    found = _schedule.read_schedule(text, {"data": 8}, H200, Topology(1, 8))
    return found.from_host_seconds, found.to_host_seconds, found.exposed_copy_seconds


@pytest.mark.parametrize(
    ("which", "fetches", "stores"), [(0, 3, 0), (1, 3, 0), (2, 3, 3), (3, 0, 3), (4, 0, 3)]
)
def test_copies_run_beside_products(which, fetches, stores):
    """All begin before the first product that could hide them, and are awaited after the last one.

    Of a forward iteration; and of backward iterations in their order, the later ones of which store what the
    one before has made, and the last ones of which fetch nothing.
    """
    text = iterations_beside_copies()[which]
    lines = text[text.index("\nENTRY") :].splitlines()

    def places(pattern):
        return [i for i, line in enumerate(lines) if re.search(pattern, line)]

    products = places(r"= \S+ (custom-call|fusion)\(.*(__cublas|gemm)")
    assert len(products) >= 3
    for kind, num in (("slice", fetches), ("update-slice", stores)):
        begin, end = (places(rf"%dynamic-{kind}-{x}\S* =") for x in ("start", "done"))
        assert len(begin) == len(end) == num
        assert all(i < products[0] for i in begin)
        assert all(i > products[-1] for i in end)
    from_host, to_host, waits = waited(text)
    assert (from_host > 0, to_host > 0) == (fetches > 0, stores > 0)
    assert waits == 0


def test_with_xla_s_defaults_copies_wait_for_each_other():
    """So the option is needed: of three copies the device waits for one."""
    takes, _, waits = waited(iterations_beside_copies(known=False)[0])
    assert waits >= takes / 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "layer_major": True}], ids=str)
def test_activations_that_wait_on_the_host_are_compiled(options):
    """For parts that hand them on: inputs of layers, on each device's host beside its shards."""
    train_step = small.shard_train_step(
        step,
        offload_params=jzero.PinnedHost(device_bytes=2**30),
        offload_activations=jzero.PinnedHost(),
        **options,
    )
    state = new_state()
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    found = jzero.preflight(train_step, state, x, target="h200", topology="1x8")
    params, kept = 12 * LAYERS * WIDTH**2 * 4 // 8, LAYERS * ROWS // 8 * WIDTH * 2
    assert found.host_bytes >= params + kept
    assert len(found.parts) > 5
