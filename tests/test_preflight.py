"""Steps compiled for GPUs that are not there: they rest and move what `describe` says."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gpu_compiler
import jzero
import programs
import small
from jzero._quantities import readable_bytes

gpu_compiler.skip_without_it()

BATCH = programs.tokens(64)


def preflight(stage, state=None, topology="1x8", axes=None, **options) -> Any:
    train_step = small.shard_train_step(programs.train_step, stage=stage, **options)
    state = programs.abstract_state(programs.Model()) if state is None else state
    return jzero.preflight(train_step, state, BATCH, topology=topology, axes=axes)


def moved(traffic):
    """`{(op, axes): bytes}`."""
    totals: dict[tuple[str, tuple[str, ...]], int] = {}
    for c in traffic:
        key = (c.op, tuple(c.axes))
        totals[key] = totals.get(key, 0) + c.nbytes
    return totals


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "axes", "options"),
    [
        (0, {"data": 16}, {}),
        (2, {"data": 16}, {"accumulate": 2}),
        (3, {"data": 16}, {"accumulate": 2, "gather": "once_per_step"}),
        (3, {"node": 2, "local": 8},
         {"param_axes": "local", "optimizer_axes": "local", "accumulate": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_at_rest_and_on_the_wire_as_described(stage, axes, options):
    found = preflight(stage, topology="2x8", axes=axes, **options)
    assert moved(found.schedule.collectives) == moved(found.report.traffic)
    batch = 4 * BATCH.size // 16
    # XLA keeps a few scalars of its own beside the arguments.
    assert 0 <= found.argument_bytes - found.at_rest - batch < 64
    assert found.peak_bytes >= found.argument_bytes


@pytest.mark.slow(but=["2"])
@pytest.mark.parametrize("stage", [2, 3])
def test_an_update_is_made_in_the_place_of_the_old_state(stage):
    """No second copy of the masters and moments, nor of all gathered parameters, is ever alive."""
    tx = jzero.master_weights(optax.adamw(1e-3))

    def step(state, x):
        def loss_fn(params):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    params = jax.ShapeDtypeStruct((32, 4096, 4096), jnp.bfloat16)
    state = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    x = jax.ShapeDtypeStruct((8 * 16, 4096), jnp.bfloat16)
    found = jzero.preflight(jzero.shard_train_step(step, stage=stage), state, x)
    gradients = 2 * params.size // 8
    # Beside the gradients' shards: parameters as they are gathered, at most two layers or slices' worth,
    # twice. The new optimizer state would be 6 times the gradients, and all parameters 8 times.
    assert found.peak_bytes - found.argument_bytes < 2 * gradients + 4 * 2**27


@pytest.mark.slow
@pytest.mark.parametrize("scan", [True, False])
def test_a_matrix_larger_than_the_bound_hides(scan):
    """All but those of a pass's first product, which has none before it."""
    num_layers, dim = 8, 8192

    def step(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), prevent_cse=not scan)

        def loss_fn(weights):
            if scan:
                return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)
            return jnp.mean(functools.reduce(lambda x, w: layer(x, w)[0], weights, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    stack = jax.ShapeDtypeStruct((num_layers, dim, dim), jnp.bfloat16)
    weights = stack if scan else [jax.ShapeDtypeStruct((dim, dim), jnp.bfloat16)] * num_layers
    x = jax.ShapeDtypeStruct((8 * 4096, dim), jnp.bfloat16)
    found = jzero.preflight(
        jzero.shard_train_step(step, comm=jzero.Comm(prefetch_bytes=2**20)), weights, x
    )
    gathers = [c for c in found.schedule.collectives if c.op == "all-gather"]
    exposed = sum(c.exposed_seconds or 0.0 for c in gathers)
    assert 0 < exposed <= 2 * gathers[0].seconds < sum(c.seconds * c.times for c in gathers)
    assert found.hidden("all-gather") == pytest.approx(
        1 - exposed / sum(c.seconds * c.times for c in gathers)
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("scan", [True, False])
def test_tiles_replace_matrices_and_their_gradients(scan, remat):
    """A few tiles are alive, in place of matrices of eight tiles each; products hide what they can."""
    num_layers, dim, rows, tile_bytes = 8, 8192, 256, 2**24

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def step(weights, x):
        block = jax.checkpoint(layer, prevent_cse=not scan) if remat else layer

        def loss_fn(weights):
            if scan:
                return jnp.mean(jax.lax.scan(block, x, weights)[0] ** 2)
            return jnp.mean(functools.reduce(lambda x, w: block(x, w)[0], weights, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    stack = jax.ShapeDtypeStruct((num_layers, dim, dim), jnp.bfloat16)
    weights = stack if scan else [jax.ShapeDtypeStruct((dim, dim), jnp.bfloat16)] * num_layers
    x = jax.ShapeDtypeStruct((8 * rows, dim), jnp.bfloat16)
    whole, tiled = (
        jzero.preflight(jzero.shard_train_step(step, comm=jzero.Comm(tile_bytes=n)), weights, x)
        for n in (None, tile_bytes)
    )
    # Beside the gradients' shards and the activations: a few tiles, and not a matrix and its gradient.
    gradients, kept = 2 * stack.size // 8, 2 * num_layers * rows * dim * (1 if remat else 2)
    beside = [f.peak_bytes - f.argument_bytes - gradients - kept for f in (whole, tiled)]
    assert beside[1] < 8.5 * tile_bytes
    assert beside[0] > 10 * tile_bytes
    assert max(c.whole_bytes for c in tiled.schedule.collectives) == tile_bytes
    assert tiled.nbytes("reduce-scatter") == whole.nbytes("reduce-scatter")
    # The result of a product is computed again. No gradient of the rows is needed: XLA drops its gathers.
    described = (3 if remat else 2) * 2 * stack.size
    assert described - 2 * 2 * dim**2 <= tiled.nbytes("all-gather") <= described
    # With so few rows collectives take far longer than products: most products have one beside them.
    schedule = tiled.schedule
    hidden_seconds = schedule.collective_seconds - schedule.exposed_seconds
    assert hidden_seconds > 0.8 * schedule.product_seconds


WIDTH, MIB = 1024, 2**20


def layered_step(scan):
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w), prevent_cse=not scan)

    def step(state, x):
        def loss_fn(params):
            if scan:
                return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2)
            return jnp.mean(functools.reduce(layer, params, x) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = TX.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    return step


TX = optax.adamw(1e-3)


@functools.cache
def offloaded(scan, num_layers, state_offload, device_bytes=16 * MIB, params=None) -> Any:
    """On 8 devices, of each of which a layer has 0.5 MiB in shards and 4 MiB gathered; rows 0.5 MiB."""
    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    weights: Any = [matrix] * num_layers
    if scan:
        weights = jax.ShapeDtypeStruct((num_layers, WIDTH, WIDTH), jnp.float32)
    state = {"params": weights, "opt_state": jax.eval_shape(TX.init, weights)}
    x = jax.ShapeDtypeStruct((8 * 128, WIDTH), jnp.float32)
    train_step = jzero.shard_train_step(
        layered_step(scan),
        memory=jzero.Memory(
            optimizer=state_offload, params=params or jzero.PinnedHost(device_bytes)
        ),
    )
    return jzero.preflight(train_step, state, x)


@pytest.mark.slow(but=["scanned"])
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_parameters_on_the_hosts_cost_a_window(scan):
    """On a device: a layer or two, a few gradients, and the layers' inputs. On its host: all else."""
    few, many = (offloaded(scan, n, jzero.HostCPU()) for n in (4, 12))
    inputs, layer = WIDTH * 128 * 4, 4 * WIDTH**2
    assert many.peak_bytes - few.peak_bytes <= 8 * inputs + 1024
    assert few.peak_bytes < 16 * MIB + 3 * layer + 8 * inputs
    assert many.argument_bytes == inputs + 4  # the batch, and the step's count
    shards = 12 * layer // 8
    pinned = many.host_bytes - many.report.plan.nbytes_at_rest(tier="pinned_host")
    assert shards <= pinned < shards + 1024  # gradients, beside the parameters
    # Each layer comes once for each pass, the last one once for both where one program does both.
    to_device = sum(c.nbytes for c in many.report.transfers if c.direction == "to device")
    assert 2 * shards - layer // 8 <= to_device <= 2 * shards
    assert "per step, each device" in str(many)


@pytest.mark.slow(but=["scanned"])
@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_parameters_in_files_cost_what_is_on_its_way(scan):
    """A device holds what it does with parameters in pinned memory, its host `host_bytes` of them.

    But for a few bytes: of files no slice is copied in the program of an iteration.
    """
    window = jzero.NVMe("unused", device_bytes=16 * MIB, host_bytes=16 * MIB)
    found = offloaded(scan, 4, jzero.NVMe("unused"), params=window)
    other = offloaded(scan, 4, jzero.HostCPU())
    assert found.peak_bytes == pytest.approx(other.peak_bytes, rel=1e-3)
    params = 4 * 4 * WIDTH**2 // 8
    assert found.host_bytes == other.host_bytes - params + 2 * MIB
    assert not found.report.plan.nbytes_at_rest(tier="pinned_host")
    assert "from disk" in str(found)


@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_the_programs_of_parts_only_copy_pinned_memory(scan):
    found = offloaded(scan, 4, jzero.HostCPU())
    assert found.parts
    assert not [part for part in found.parts if part.host_operations]
    assert "no program computes there" in str(found)
    for part in found.parts:
        if part.name in ("fetch", "store"):
            # No second copy of a stack: what is not the slice are a few indices.
            assert part.temporary_bytes < 4096
            assert part.argument_bytes + part.made_bytes < WIDTH**2 * 4 // 8 + 4096


def test_equal_layers_share_their_programs():
    few, many = (offloaded(False, n, jzero.HostCPU()) for n in (4, 12))
    assert len(few.parts) == len(many.parts)
    assert sum(part.times for part in many.parts) - sum(part.times for part in few.parts) == 16


def test_the_schedule_of_parts_is_that_of_all_their_runs():
    found = offloaded(True, 8, jzero.HostCPU())
    assert moved(found.schedule.collectives) == moved(found.report.traffic)
    rows = found.to_dict()
    assert json.loads(json.dumps(rows)) == rows
    assert {row["name"] for row in rows["parts"]} >= {"fetch", "iteration", "stretch"}
    text = str(found)
    assert max(map(len, text.splitlines())) <= 80
    assert "Also not seen, for a step of several programs: the time of an update" in " ".join(
        text.split()
    )


@pytest.mark.parametrize("scan", [True, False], ids=("scanned", "unrolled"))
def test_the_time_of_copies_of_parts(scan):
    """Slices are copied in programs of iterations, except the first ones; whole leaves beside programs."""
    found = offloaded(scan, 4, jzero.HostCPU())
    schedule, host = found.schedule, found.target.host.bandwidth
    assert schedule.step_seconds == pytest.approx(
        schedule.compute_seconds + schedule.exposed_seconds + schedule.exposed_copy_seconds
    )
    seconds = {
        way: sum(c.nbytes for c in found.report.transfers if c.direction == way) / host
        for way in ("to device", "to host")
    }
    assert schedule.from_host_seconds == pytest.approx(seconds["to device"], rel=1e-3)
    assert schedule.to_host_seconds == pytest.approx(seconds["to host"], rel=1e-3)
    assert 0 < schedule.exposed_copy_seconds < schedule.from_host_seconds
    assert "for copies, which take" in " ".join(str(found).split())


@pytest.mark.slow
def test_optimizer_state_on_the_hosts():
    """One forward-backward program, and its update; without parameters on the hosts."""
    state = programs.abstract_state(programs.Model())
    for policy, names in (
        (jzero.HostCPU(), {"grad_part"}),
        (jzero.PinnedHost(), {"grad_part", "update"}),
    ):
        train_step = small.shard_train_step(programs.train_step, memory=policy)
        found = jzero.preflight(train_step, state, BATCH)
        assert {part.name for part in found.parts} == names
        assert found.fits


@pytest.mark.slow
def test_verdict_and_limits():
    state = programs.abstract_state(programs.Model())
    train_step = small.shard_train_step(programs.train_step)
    found = jzero.preflight(train_step, state, BATCH, target="a100-80gb", topology="1x4")
    assert found.fits
    assert found.usable_bytes == int(0.75 * 85100068864)
    text = str(found)
    assert text.startswith(
        "jzero preflight: 4 x NVIDIA A100-SXM4-80GB (1 hosts of 4), compiled in "
    )
    assert "FITS, with 59.4 GiB: the peak is" in text
    assert "Not seen: buffers of NCCL" in text
    assert "for a step of several programs" not in " ".join(text.split())
    assert (found.parts, found.host_bytes) == ((), 0)
    assert max(map(len, text.splitlines())) <= 80
    rows = found.to_dict()
    assert json.loads(json.dumps(rows)) == rows
    assert rows["peak_bytes"] == found.peak_bytes
    assert rows["fits"] is True
    gathers = [row["bytes"] for row in rows["collectives"] if row["op"] == "all-gather"]
    assert sum(gathers) == found.nbytes("all-gather") > 0
    assert found.report is not None
    assert rows["step"] == found.report.to_dict()
    assert f"the peak is {readable_bytes(rows['peak_bytes'])}" in " ".join(text.split())
    found = jzero.preflight(train_step, state, BATCH, topology="1x4", memory_fraction=1e-7)
    assert not found.fits
    assert "DOES NOT FIT, by" in str(found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"xla_gpu_nope": 1}, "No such compile option: 'xla_gpu_nope'."),
        (
            {"xla_gpu_autotune_level": "x"},
            "While setting option xla_gpu_autotune_level, 'x' is not",
        ),
    ],
)
@pytest.mark.parametrize("offload", [jzero.NoOffload(), jzero.PinnedHost()])
def test_options_that_xla_does_not_have(options, said, offload):
    state = programs.abstract_state(programs.Model())
    train_step = small.shard_train_step(programs.train_step, memory=offload)
    with pytest.raises(
        jzero.OptionError, match="preflight: compiler_options has 'xla_gpu_"
    ) as caught:
        jzero.preflight(train_step, state, BATCH, compiler_options=options)
    assert f"XLA says: {said}" in str(caught.value)
    assert str(caught.value).endswith("Correct it, or drop it.")


@pytest.mark.slow
def test_the_most_rows_that_fit():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - grad, loss

    w = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def check(rows, accumulate, **options):
        x = jax.ShapeDtypeStruct((rows * 8 * accumulate, 256), jnp.float32)
        train_step = jzero.shard_train_step(step, microbatches=accumulate)
        return jzero.preflight(train_step, w, x, memory_fraction=1e-4, **options)

    for start, accumulate in ((1000, 1), (100_000, 2)):  # below and above what fits
        found = check(start, accumulate, search_batch=True)
        assert found.rows == start
        assert f"microbatch that fit: {found.largest_rows} (compiled: {start})" in str(found)
        assert check(found.largest_rows, accumulate).fits
        assert not check(found.largest_rows + 1, accumulate).fits


def test_a_step_that_takes_only_some_numbers_of_rows():
    def step(w, x):
        parts = x.reshape(4, -1, 64)  # its own microbatches
        losses = jax.vmap(lambda part: jnp.mean(part @ w))(parts)
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), losses.mean()

    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    train_step = small.shard_train_step(step)
    found = jzero.preflight(train_step, w, x, memory_fraction=1e-5, search_batch=True)
    assert (found.largest_rows or 0) > (found.rows or 0) == 4
    assert (found.largest_rows or 0) % 4 == 0


def test_there_must_be_rows_to_search():
    train_step = small.shard_train_step(lambda w, x: w - x.sum(), in_specs={"x": P()}, stage=0)
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    with pytest.raises(jzero.BatchError, match="no argument is sharded over the devices"):
        jzero.preflight(train_step, w, w, search_batch=True)


@pytest.mark.slow
def test_rows_of_all_arguments_change_together():
    def step(w, x, momentum, y):
        momentum += jax.grad(lambda w: jnp.mean(x @ w) + jnp.mean(y @ w))(w)
        return w - momentum, momentum

    shapes = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, 16, 24)]
    train_step = small.shard_train_step(step, state=(0, 2))
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    found = jzero.preflight(
        train_step, w, shapes[0], w, y=shapes[1], memory_fraction=1e-5, search_batch=True
    )
    assert (found.largest_rows or 0) > (found.rows or 0) == 1
    with pytest.raises(jzero.BatchError, match=r"arguments with \[2, 3\] rows for each device"):
        jzero.preflight(train_step, w, shapes[1], w, shapes[2])


def test_a_program_that_is_not_ours():
    mesh = jzero.target_mesh("h100", "1x8")

    def spread(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    lowered = jax.jit(lambda x, w: x @ w).lower(
        spread((64, 512), "data"), spread((512, 1024), "data")
    )
    found = jzero.preflight(lowered, target="h100", topology="1x8")
    assert (found.report, found.at_rest) == (None, None)
    assert found.nbytes("all-gather") == 4 * 512 * 1024
    assert found.argument_bytes == 4 * (64 * 512 + 512 * 1024) // 8
    assert "arguments" in str(found)
    for target, topology in (("h200", "1x8"), ("h100", "2x8"), ("tpu-v5e", "2x4")):
        with pytest.raises(
            jzero.OptionError, match="a program lowered for 8 x NVIDIA H100 80GB HBM3"
        ):
            jzero.preflight(lowered, target=target, topology=topology)
    with pytest.raises(jzero.MeshError, match="The axes' sizes must multiply to 8"):
        jzero.preflight(lowered, target="h100", axes={"data": 4})


def test_a_step_on_another_mesh_is_planned_the_same():
    train_step = small.shard_train_step(
        programs.train_step, mesh=small.mesh(node=2, local=4), axes=jzero.Axes(params="local")
    )
    state = programs.abstract_state(programs.Model())
    found = jzero.preflight(train_step, state, BATCH, topology="2x4")  # as many devices
    assert found.report
    assert found.report.plan.leaves == train_step.plan(state, BATCH).leaves
    with pytest.raises(jzero.MeshError, match="Sizes of several axes cannot be guessed"):
        jzero.preflight(train_step, state, BATCH, topology="2x8")
    one_axis = small.shard_train_step(programs.train_step, mesh=small.mesh(x=8))
    found = jzero.preflight(one_axis, state, BATCH, topology="2x8")
    assert found.report
    assert found.report.plan.axes == (("x", 16),)
