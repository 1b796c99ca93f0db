"""What is read of a compiled GPU program: groups, bandwidths, products, and what hides behind them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gpu_compiler
import jzero
from jzero.preflight import _schedule
from jzero.targets._target import Topology, find_target

gpu_compiler.skip_without_it()

H200 = find_target("test", "h200")
AXES = {"node": 2, "local": 4}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("local",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("node",)),
        ("[2,4]<=[8]", ("local",)),
        ("[4,2]<=[2,4]T(1,0)", ("node",)),
        ("mesh['axis_0'=8] {'axis_0'}", ("node", "local")),
        ("mesh['node'=2,'local'=4] {'node'}", ("node",)),
        ("{{0},{1}}", ()),
        ("{}", ("node", "local")),
        ("{{0,1,4,5}}", ("node", "local")),
    ],
)
def test_axes_behind_replica_groups(groups, expected):
    group = _schedule.groups_of(f"channel_id=1, replica_groups={groups}, x")
    assert _schedule.along(group, AXES) == expected


def test_axes_of_a_permutation():
    for pairs, axes in {
        "{{0,1},{1,2}}": ("local",), "{{0,1},{1,2},{3,4}}": ("node", "local"),
        "{{3,4},{4,3}}": ("node", "local"), "{{1,5},{5,1}}": ("node",),  # without device 0
    }.items():  # fmt: skip
        group = _schedule.groups_of(f"source_target_pairs={pairs}, x")
        assert _schedule.along(group, AXES) == axes, pairs


def compiled(fn, *args):
    lowered = jax.jit(fn).lower(*args)
    return jzero.preflight(lowered, topology="1x8").schedule


def spread(shape, *spec, dtype=jnp.bfloat16):
    sharding = NamedSharding(jzero.target_mesh(topology="1x8"), P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_products_are_counted_loops_multiplied_out(dtype):
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    found = compiled(
        fn, spread((8 * 2048, 2048), "data", dtype=dtype), spread((7, 2048, 2048), dtype=dtype)
    )
    passes = 2 if dtype == jnp.float32 else 1  # TF32 is half as fast
    seconds = 7 * 2 * 2048**3 / H200.bf16_flops * passes
    assert found.product_seconds == pytest.approx(seconds)
    assert found.product_seconds < found.compute_seconds < 1.5 * seconds
    assert found.step_seconds == found.compute_seconds
    assert found.collectives == ()


@pytest.mark.parametrize(("dtype", "factor"), [(jnp.bfloat16, 1), (jnp.complex64, 8)])
def test_products_by_xla_s_calls_of_libraries_are_counted(dtype, factor):
    """Without Triton they are calls of cuBLASLt; a complex product is four of TF32."""
    x = spread((8 * 4096, 4096), "data", dtype=dtype)
    lowered = jax.jit(jnp.matmul).lower(x, spread((4096, 4096), dtype=dtype))
    options = {"xla_gpu_enable_triton_gemm": False}
    found = jzero.preflight(lowered, topology="1x8", compiler_options=options).schedule
    assert found.product_seconds == pytest.approx(factor * 2 * 4096**3 / H200.bf16_flops)


def test_one_branch_of_a_conditional_and_one_iteration_of_an_unknown_number():
    x, w = spread((8 * 4096, 4096), "data"), spread((4096, 4096))
    branches = [lambda x, w, n=n: jnp.tanh(n * x) @ w for n in range(1, 4)]

    def chosen(i, x, w):
        return jax.lax.switch(i, branches, x, w)

    def repeated(num, x, w):
        return jax.lax.fori_loop(0, num, lambda _, x: x @ w, x)

    lowered = [jax.jit(fn).lower(spread((), dtype=jnp.int32), x, w) for fn in (chosen, repeated)]
    one, many = (jzero.preflight(x, topology="1x8") for x in lowered)
    for found, loops in ((one, 0), (many, 1)):
        seconds = 2 * 4096**3 / H200.bf16_flops
        assert found.schedule.product_seconds == pytest.approx(seconds)
        assert found.to_dict()["unknown_loops"] == loops
        said = " ".join(str(found).split())
        assert ("One loop of unknown length counts once." in said) == bool(loops)


@pytest.mark.slow
def test_a_collective_hides_behind_a_product_that_does_not_need_it():
    x, w = spread((4096, 4096), "data"), spread((4096, 4096))
    shard = spread((4096, 4096), "data")

    def gathered(x, shard):
        return x @ jax.lax.with_sharding_constraint(
            jnp.sin(shard), NamedSharding(jzero.target_mesh(topology="1x8"), P())
        )

    exposed = compiled(gathered, x, shard)
    (gather,) = exposed.collectives
    assert (gather.op, gather.hidden, gather.nbytes) == ("all-gather", 0.0, 2 * 4096 * 4096)
    assert exposed.exposed_seconds == pytest.approx(gather.seconds)

    def behind(x, w, shard):
        for _ in range(8):
            x = jnp.tanh(x @ w)
        return gathered(x, shard)

    hidden = compiled(behind, x, w, shard)
    (gather,) = hidden.collectives
    left = max(0, gather.seconds - 8 / 9 * hidden.product_seconds)
    assert hidden.exposed_seconds <= left + 1e-9 < exposed.exposed_seconds
    assert gather.hidden >= 1 - (left + 1e-9) / gather.seconds


@pytest.mark.slow
def test_a_fetch_hides_only_within_the_program_of_the_products():
    """As XLA compiles it: the slice that comes next, fetched beside products; and by a program of its own."""
    mesh = jzero.target_mesh("h100", "1x1").abstract_mesh
    here, there = (NamedSharding(mesh, P(), memory_kind=kind) for kind in ("device", "pinned_host"))
    dim, products = 4096, 24

    def fetch(stack, i):
        return jax.device_put(jax.lax.dynamic_index_in_dim(stack, i, 0, keepdims=False), here)

    def compute(x, w):
        for _ in range(products):
            x = jnp.tanh(x @ w)
        return x

    def read(fn, outs, *args):
        with jax.set_mesh(jzero.target_mesh("h100", "1x1")):
            lowered: Any = jax.jit(fn, out_shardings=outs).lower(*args)
        compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
        return _schedule.Started(_schedule.read_program(str(compiled.as_text())))

    def array(shape, place, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    x, w, stack = array((dim, dim), here), array((dim, dim), here), array((8, dim, dim), there)
    i = array((), here, jnp.int32)
    within = read(lambda x, w, stack, i: (compute(x, w), fetch(stack, i)), here, x, w, stack, i)
    apart = read(fetch, here, stack, i), read(compute, here, x, w)
    target = find_target("test", "h100")

    def modelled(*started):
        return _schedule.schedule_of(started, {"data": 1}, target, Topology(1, 1))

    seconds = 2 * dim**2 / target.host.bandwidth
    found = modelled(within)
    assert found.from_host_seconds == pytest.approx(seconds)
    assert found.product_seconds > seconds
    assert found.exposed_copy_seconds == 0
    found = modelled(*apart)
    assert (
        found.exposed_copy_seconds
        == pytest.approx(found.from_host_seconds)
        == pytest.approx(seconds)
    )


def test_a_collective_in_loops_in_loops_counts_once_for_each_turn():
    x = spread((512, 512), "data")
    whole = NamedSharding(jzero.target_mesh(topology="1x8"), P())

    def inner(x, _):
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(jnp.sin(x), whole)), None

    def outer(x, _):
        return jax.lax.scan(inner, x, None, length=3)[0], None

    found = compiled(lambda x: jax.lax.scan(outer, x, None, length=5)[0], x)
    assert sum(each.times for each in found.collectives if each.op == "all-gather") == 15
