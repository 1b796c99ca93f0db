"""Activations that wait on the host, in programs compiled for GPUs: places of slices, memory, overlap."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import gpu_compiler
import jzero
import small
from jzero.sharding.analysis import _residuals

gpu_compiler.skip_without_it()

PRODUCT = r"__cublas|gemm| dot\(|triton"
LAYERS, WIDTH, ROWS = 8, 256, 8 * 1024
# Bytes of a block input on one of 8 devices: 1 MiB, the least that moves.
SLICE = 4 * WIDTH * ROWS // 8


def make_step(scan, num_layers):
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w) @ w.T, prevent_cse=not scan)

    def loss_fn(params, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)
        else:
            for w in params:
                x = layer(x, w)
        return jnp.mean(x**2)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    matrix = (WIDTH, 2 * WIDTH)
    shapes = (num_layers, *matrix) if scan else [matrix] * num_layers
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )  # fmt: skip
    return step, params, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


@functools.cache
def compiled(scan, where, stage=3, num_layers=LAYERS, accumulate=1):
    step, params, _ = make_step(scan, num_layers)
    x = jax.ShapeDtypeStruct((accumulate * ROWS, WIDTH), jnp.float32)
    policy = {"host": jzero.PinnedHost(), "device": jzero.NoOffload()}[where]
    mesh = jzero.target_mesh("h200", "1x8")
    train_step = small.shard_train_step(
        step,
        stage=stage,
        microbatches=accumulate,
        mesh=mesh,
        memory=jzero.Memory(activations=policy),
    )
    lowered = train_step.lower(params, x)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def places(text):
    """Of each slice of a stack on the host that a loop reads or writes: where it begins, and its stride."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        config = re.search(
            r'"linear":\{"byte_offset":"(-?\d+)","byte_stride":"(-?\d+)"\}', computation
        )
        op = re.search(r" (dynamic-slice|dynamic-update-slice)\(", computation)
        alone = "S(5)" in computation and " tuple(" not in computation
        if config and op and alone:
            found.setdefault(op.group(1), set()).add(tuple(map(int, config.groups())))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulate"), [(3, 1), (1, 2)])
def test_backward_loops_read_each_slice_where_the_forward_loop_wrote_it(stage, accumulate):
    """XLA of JAX 0.10.2 took a slice's place in a backward loop, n - 1 - i, for i (`_host_memory.py`)."""
    text = str(compiled(True, "host", stage, accumulate=accumulate).as_text())
    assert "S(5)" in text
    found = places(text)
    assert any(stride == SLICE for _, stride in found["dynamic-update-slice"])
    backwards = [(begin, stride) for begin, stride in found["dynamic-slice"] if stride == -SLICE]
    assert backwards
    # An iteration fetches for the one after it; XLA may have taken the first iteration out of the loop.
    assert all(begin in ((LAYERS - 2) * SLICE, (LAYERS - 3) * SLICE) for begin, _ in backwards)


@pytest.mark.slow
def test_device_memory_does_not_grow_with_the_layers():
    """But by what is not kept for the backward pass: gradients, in shards."""
    few, many = (
        compiled(True, "host", num_layers=n).memory_analysis() for n in (LAYERS, 2 * LAYERS)
    )
    assert many.temp_size_in_bytes - few.temp_size_in_bytes <= SLICE
    assert few.host_temp_size_in_bytes == LAYERS * SLICE
    assert compiled(True, "device").memory_analysis().host_temp_size_in_bytes == 0


@pytest.mark.slow
def test_values_of_unrolled_layers_leave_at_once_and_come_back_when_due(monkeypatch):
    """XLA would start a copy when the backward pass asks for it, and fetch all of them at once."""
    monkeypatch.setattr(_residuals, "ON_THEIR_WAY", 2 * SLICE)
    text = str(compiled(False, "host", num_layers=LAYERS + 1).as_text())
    copy = re.compile(r"%(\S+) = \((f32\S+), (f32\S+), \S+ copy-start\(%?(\S+?)\)")
    entry = text[text.index("\nENTRY") :].splitlines()
    sent: dict[str, str] = {}
    fetched: list[str] = []
    flying, most = 0, 0
    for line in entry:
        if found := copy.search(line):
            name, to, _, of = found.groups()
            if "S(5)" in to:
                sent[name.replace("copy-start", "copy-done")] = name
                flying, most = flying + 1, max(most, flying + 1)
            else:
                fetched.append(of)
        elif (done := re.match(r"\s*%(\S+) = ", line)) and done.group(1) in sent:
            flying -= 1
    assert len(sent) == len(fetched) == LAYERS  # The first layer's input is an argument.
    assert most <= 3  # Two, and the one that is made.
    latest_first = list(reversed(sent))
    assert all(abs(place - latest_first.index(x)) <= 2 for place, x in enumerate(fetched))


def test_the_peak_is_the_devices():
    """XLA reports that of the memory that has the larger one; preflight does not."""
    step, *arguments = make_step(True, 4 * LAYERS)
    found = jzero.preflight(
        small.shard_train_step(step, memory=jzero.Memory(activations=jzero.PinnedHost())),
        *arguments,
    )
    assert found.peak_bytes < 4 * LAYERS * SLICE  # all on the host
    assert (
        found.argument_bytes < found.peak_bytes <= found.argument_bytes + found.temporary_bytes + 64
    )


def test_copies_run_beside_the_compute():
    """Both start before a product of the iteration and end after it."""
    text = str(compiled(True, "host").as_text())
    for kind in ("dynamic-update-slice", "dynamic-slice"):
        started = [
            computation.partition(f"%{kind}-start")[2]
            for computation in re.split(r"\n(?=%|ENTRY)", text)
            if f"%{kind}-start" in computation and not computation.startswith("ENTRY")
        ]
        assert started
        for after in started:
            assert re.search(PRODUCT, after.partition(f"%{kind}-done")[0])
