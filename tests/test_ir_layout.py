"""`jzero.ir._layout`: what layouts mean, on real arrays, and conversions as programs of 8 devices."""

import functools
import itertools
import math
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P

import partitioned
import programs
import small
from jzero.ir import _layout
from jzero.ir._layout import LOCAL, Layout, Partial, conversion, replicated
from jzero.sharding.partition._writer import DeviceMove, DeviceWriter
from jzero.targets._links import AxisTimes, axis_times
from jzero.targets._target import Topology, find_target
from jzero.tracing import _jaxpr
from jzero.tracing._types import Var
from layout_blocks import held_by, positions, received, swapped

MESHES = ({"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 2}, {"b": 2, "a": 3}, {"a": 8, "one": 1})
GARBAGE = 777  # What padding holds.


def devices(mesh):
    """Every device: its place on each axis."""
    return [
        dict(zip(mesh, at, strict=True)) for at in itertools.product(*map(range, mesh.values()))
    ]


def value_of(shape):
    return np.random.default_rng(math.prod(shape)).integers(-9, 10, shape).astype(np.float32)


def terms_of(layout, value, mesh):
    """What each device holds, by the blocks; of partial sums random terms, that make the value."""
    rng = np.random.default_rng(1)
    summed = [p for p in layout.partial if p.op == "sum"]
    others = [p for p in layout.partial if p.op != "sum"]
    whole = Layout(layout.dims, layout.mesh)
    terms, cache = [], {}
    for device in devices(mesh):
        at = tuple(device[p.axis] for p in layout.partial)
        if at not in cache:
            cache[at] = rng.integers(-9, 10, value.shape).astype(value.dtype)
        terms.append(cache[at])
    if summed and not others:
        cache[max(cache)][:] += value - sum(cache.values())
    elif others:  # The first device has the value; what others have is no larger (no smaller).
        sign = -1 if others[0].op == "max" else 1
        for at, term in cache.items():
            term[:] = value if not any(at) else value + sign * np.abs(term)
    else:
        terms = [value] * len(terms)
    return [
        held_by(whole, term, device, GARBAGE)
        for device, term in zip(devices(mesh), terms, strict=True)
    ]


def assembled(layout, blocks, mesh):
    """The whole value, of all blocks: each element once for each replica, and all replicas equal."""
    unknown = functools.partial(np.full, layout.shape, np.nan, np.float32)
    terms: dict[tuple[int, ...], np.ndarray] = defaultdict(unknown)
    for device, block in zip(devices(mesh), blocks, strict=True):
        assert block.shape == layout.local_shape
        own = positions(layout, device)
        inside = np.ix_(*(np.flatnonzero(at >= 0) for at in own))
        index = np.ix_(*(at[at >= 0] for at in own))
        term = terms[tuple(device[p.axis] for p in layout.partial)]
        held = term[index]
        assert np.all(np.isnan(held) | (held == block[inside]))
        term[index] = block[inside]
    assert not any(np.isnan(term).any() for term in terms.values())
    op = next((p.op for p in layout.partial), "sum")
    return getattr(np, op)(list(terms.values()), axis=0)


# -- layouts ----------------------------------------------------------------------------------------
@st.composite
def shapes(draw, max_dims=3):
    sizes = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
    return tuple(draw(st.lists(sizes, min_size=1, max_size=max_dims)))


@st.composite
def layouts_of(draw, shape, mesh, sums=True):
    """Shards (nested, dealt out, padded), partial sums of one operation."""
    layout = replicated(shape, mesh)
    op = draw(st.sampled_from(["sum", "sum", "max", "min"]))
    for axis in draw(st.permutations(list(mesh))):
        kind = draw(st.sampled_from(["none", "cut", "cut", "dealt", "partial"]))
        d = draw(st.integers(0, len(shape) - 1))
        if kind == "partial" and sums:
            layout = layout.with_partial(Partial(axis, op))
        elif kind in ("cut", "dealt"):
            size = layout.dims[d].true
            outers = [k for k in range(1, size + 1) if size % k == 0] if kind == "dealt" else [None]
            try:
                layout = layout.cut(d, axis, draw(st.sampled_from(outers)))
            except AssertionError:
                pass
    return layout


def split(draw, shape):
    """Another shape of as many elements."""
    flat = [p for n in shape for p in primes(n)]
    cuts = sorted(draw(st.lists(st.integers(0, len(flat)), max_size=3)))
    ends = zip([0, *cuts], [*cuts, len(flat)], strict=True)
    return tuple(math.prod(flat[a:b]) for a, b in ends)


def primes(n):
    for p in (2, 3, 5):
        if n % p == 0 and n > 1:
            return [p, *primes(n // p)]
    return []


@st.composite
def near(draw, layout, mesh):
    """Where partial sums are scattered or reduced, and axes change places."""
    for p in layout.partial:
        layout = layout.reduced([p.axis])
        try:
            layout = layout.cut(draw(st.integers(0, len(layout.dims) - 1)), p.axis)
        except AssertionError:
            pass
    a, b = draw(st.sampled_from([(a, b) for a in mesh for b in mesh if mesh[a] == mesh[b]]))
    return swapped(layout, a, b)


@st.composite
def cases(draw, sums=True, num=1):
    mesh = draw(st.sampled_from(MESHES))
    shape = draw(shapes())
    found: list[Layout] = []
    while len(found) < num:
        if found and draw(st.booleans()):
            found.append(draw(near(found[0], mesh)))
            continue
        start = split(draw, shape) if draw(st.booleans()) else shape
        layout = draw(layouts_of(start, mesh, sums))
        found.append(layout.reshapable(shape).reshape(shape))
    return mesh, *found


@pytest.mark.slow
@given(cases(sums=False))
@settings(max_examples=200)
def test_blocks_are_those_of_a_reshape(case):
    """The definition, `[outer, n, inner]`, by NumPy's reshape and pad."""
    mesh, layout = case
    value = value_of(layout.shape)
    padded = value
    for d, dim in enumerate(layout.dims):
        if dim.pad:
            s = padded.shape
            padded = padded.reshape(*s[:d], dim.pad.outer, dim.pad.true, *s[d + 1 :])
            more = [(0, 0)] * padded.ndim
            more[d + 1] = (0, dim.size // dim.pad.outer - dim.pad.true)
            padded = np.pad(padded, more, constant_values=GARBAGE)
            padded = padded.reshape(*s[:d], dim.size, *s[d + 1 :])
    for device in devices(mesh):
        block = padded
        for d, dim in enumerate(layout.dims):
            # The innermost first: those before it keep their places.
            for cut in reversed(dim.cuts):
                s, n = block.shape, mesh[cut.axis]
                parts = block.reshape(*s[:d], cut.outer, n, -1, *s[d + 1 :])
                block = parts.take(device[cut.axis], d + 1).reshape(*s[:d], s[d] // n, *s[d + 1 :])
        np.testing.assert_array_equal(held_by(layout, value, device, GARBAGE), block)


@pytest.mark.slow
@given(cases(), st.data())
@settings(max_examples=400)
def test_reshape_is_a_reshape_of_each_block(case, data):
    mesh, layout = case
    shape = split(data.draw, layout.shape)
    before = layout.reshapable(shape)
    after = before.reshape(shape)
    assert after.shape == shape
    assert after.partial == layout.partial
    value = value_of(layout.shape)
    for device in devices(mesh):
        np.testing.assert_array_equal(
            held_by(before, value, device, GARBAGE).reshape(after.local_shape),
            held_by(after, value.reshape(shape), device, GARBAGE),
        )


MESH = {"data": 4, "model": 2}


def lay(shape, *cuts, mesh=None):
    layout = replicated(shape, mesh or MESH)
    for cut in cuts:
        layout = layout.with_partial(cut) if isinstance(cut, Partial) else layout.cut(*cut)
    return layout


ROWS = lay((10, 6), (0, "data"))


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (lay((16, 8), (0, "data"), (0, "model")), "[16@data,model, 8]"),
        (ROWS, "[10+2@data, 6]"),
        (ROWS.reshape((60,)), "[60+12@data]"),
        (ROWS.reshapable((5, 2, 6)), "[10, 6]"),
        (ROWS.reshape((10, 2, 3)), "[10+2@data, 2, 3]"),
        (lay((40, 8), (0, "data", 5)), "[40@5,data, 8]"),
        (lay((40, 8), (0, "data", 5)).reshape((5, 8, 8)), "[5, 8@data, 8]"),
        (lay((4, 10), (1, "data")).reshape((40,)), "[4*(10+2)@4,data]"),
        (lay((4, 10), (0, "model"), (1, "data")).reshape((40,)), "[4*(10+2)@model,2,data]"),
        (lay((8,), (0, "data")).with_partial(Partial("model", "max")), "[8@data] max(model)"),
        (lay((1, 8), (0, "data")).reshape((8,)), "[8+24@data]"),
        (lay((3, 2), (1, "data")).reshape((6,)), "[3*(2+2)@3,data]"),
        (lay((3, 2), (1, "data")).reshape((6,)).reshape((3, 2)), "[3, 2+2@data]"),
        (lay((), Partial("data")), "[] sum(data)"),
        (lay((8,), (0, "one"), mesh={"one": 1}), "[8]"),
    ],
)
def test_a_layout_prints_as_a_short_text(layout, text):
    assert str(layout) == text


# -- conversions ------------------------------------------------------------------------------------
def program(source: Layout, target: Layout, mesh: dict[str, int], moves: dict[Var, DeviceMove]):
    """`convert` as a function of what each device holds, its places on the mesh in front."""
    like = jax.make_jaxpr(lambda x: x + 1)(np.zeros(source.local_shape, np.float32)).jaxpr
    writer = DeviceWriter(like.eqns[0], mesh, moves)
    out = writer.convert(like.invars[0], source, target)
    jaxpr = writer.close(like, like.invars, [out])

    def on_device(x):
        (y,) = _jaxpr.evaluate(jaxpr, writer.consts, x.reshape(x.shape[len(mesh) :]))
        return y.reshape(*[1] * len(mesh), *y.shape)

    where = small.auto_mesh(**mesh)
    return jax.jit(
        jax.shard_map(on_device, mesh=where, in_specs=P(*mesh), out_specs=P(*mesh), check_vma=False)
    )


COMPILED = {
    "gather": "all-gather", "scatter": "reduce-scatter", "exchange": "all-to-all", "reduce": "all-reduce",
    "permute": "collective-permute",
}  # fmt: skip


def check_run(mesh, source, target, compiled=False):
    steps, moves = conversion(source, target, 4), dict[Var, DeviceMove]()
    value = value_of(source.shape)
    run_on_devices = program(source, target, mesh, moves)
    stacked = np.stack(terms_of(source, value, mesh))
    stacked = stacked.reshape(*mesh.values(), *source.local_shape)
    moving = [s for s in steps if s.kind not in LOCAL]
    assert [(m.kind, m.axes) for m in moves.values()] == [(s.kind, s.axes) for s in moving]
    assert sum(m.nbytes for m in moves.values()) == sum(received(moving).values())
    if compiled:
        text = run_on_devices.lower(stacked).compile().as_text()
        made: Counter[str] = Counter()
        for step in steps:
            made[step.kind] += math.prod(step.after.local_shape)
        for kind, name in COMPILED.items():
            assert sum(programs.compiled_elements(text, name)) == made[kind]
    out = np.asarray(run_on_devices(stacked)).reshape(-1, *target.local_shape)
    np.testing.assert_array_equal(assembled(target, list(out), mesh), value)


@given(cases(num=2))
@settings(max_examples=60)
def test_conversions_run_on_devices(case):
    check_run(*case)


def peers(device, axes, mesh):
    for at in itertools.product(*(range(mesh[a]) for a in axes)):
        yield {**device, **dict(zip(axes, at, strict=True))}


def held(layout, device):
    return set(itertools.product(*(map(int, at) for at in positions(layout, device))))


@given(cases(sums=False, num=2))
@settings(max_examples=150)
def test_bytes_of_an_axis_are_what_comes_from_across_it(case):
    """Of gathers and exchanges: elements that a device lacks, of the devices of the group that have them."""
    mesh, source, target = case
    for step in conversion(source, target, 1):
        if step.kind not in ("gather", "exchange") or any(
            d.pad for d in (*step.before.dims, *step.after.dims)
        ):
            continue
        for device in devices(mesh):
            found: Counter[str] = Counter()
            lacks = held(step.after, device) - held(step.before, device)
            for peer in peers(device, step.axes, mesh):
                if theirs := lacks & held(step.before, peer):
                    found[next(a for a in mesh if peer[a] != device[a])] += len(theirs)
            assert found == Counter(dict(step.received))


DATA, MODEL, DUE = (0, "data"), (0, "model"), Partial("data")
ALL = (Partial("data"), Partial("model"))
ROW_MAJOR = {"data": 1536, "model": 256}  # Of 2 KiB over both axes.


@pytest.mark.parametrize(
    ("source", "target", "steps", "nbytes"),
    [
        # ZeRO: gather a leaf, scatter a gradient, reduce a metric.
        (lay((64, 8), DATA), lay((64, 8)), "gather(data)", {"data": 1536}),
        (lay((64, 8), DATA, MODEL), lay((64, 8)), "gather(data,model)", ROW_MAJOR),
        (lay((64, 8), DUE), lay((64, 8), DATA), "scatter(data)", {"data": 1536}),
        (lay((64, 8), DUE), lay((64, 8)), "reduce(data)", {"data": 3072}),
        (lay((64, 8), *ALL), lay((64, 8), DATA, MODEL), "scatter(data,model)", ROW_MAJOR),
        (lay((64, 8), DUE, (1, "model")), lay((64, 8), DATA, (1, "model")), "scatter(data)", {"data": 768}),
        # Shards that are not in the mesh's order: little of them crosses the outer axis.
        (lay((64, 8), MODEL, DATA), lay((64, 8)), "gather(data) gather(model)", {"data": 768, "model": 1024}),
        (lay((64, 8), *ALL), lay((64, 8), MODEL, DATA), "scatter(model) scatter(data)",
         {"data": 768, "model": 1024}),
        # Hybrid sharding: scatter in one axis, reduce what is left in the other.
        (lay((64, 8), *ALL), lay((64, 8), DATA), "scatter(data) reduce(model)", {"data": 1536, "model": 512}),
        # A sum is scattered before anything else moves, even where the target has no such shards.
        (lay((64, 8), DATA, Partial("model")), lay((64, 8), MODEL),
         "scatter(model) gather(data) exchange(model)", {"model": 768, "data": 768}),
        # Ulysses: from sequence to heads.
        (lay((64, 8), DATA), lay((64, 8), (1, "data")), "exchange(data)", {"data": 384}),
        (lay((64, 8)), lay((64, 8), (1, "data")), "slice(data)", {}),
        # Other devices have the very block.
        (lay((64, 8), DATA, MODEL), lay((64, 8), MODEL, DATA), "permute(data,model)", {"data": 256}),
        (lay((9, 8), DATA), lay((9, 8)), "gather(data) unpad()", {"data": 288}),
        (lay((9, 8), DUE), lay((9, 8), DATA), "pad() scatter(data)", {"data": 288}),
        (lay((9, 6), DATA), lay((9, 6), (1, "data")), "pad() exchange(data) unpad()", {"data": 72}),
        (lay((8, 8)), lay((8, 8), DUE), "mask(data)", {}),
        (lay((8, 8), Partial("data", "max")), lay((8, 8), DATA), "reduce(data) slice(data)", {"data": 384}),
        (lay((40, 2), (0, "data", 5)), lay((40, 2), DATA), "gather(data) slice(data)", {"data": 240}),
        (lay((64, 2), (0, "data", 16)), lay((64, 2), DATA), "exchange(data)", {"data": 96}),
    ],
)  # fmt: skip
def test_a_conversion_costs_what_it_should(source, target, steps, nbytes):
    found = conversion(source, target, 4)
    assert " ".join(f"{s.kind}({','.join(s.axes)})" for s in found) == steps
    assert received(found) == nbytes
    check_run(MESH, source, target, compiled=True)


ABC = {"a": 2, "b": 2, "c": 2}


def test_a_block_passes_to_the_device_that_needs_it():
    source, target = lay((8, 4), (0, "a"), mesh=ABC), lay((8, 4), (0, "b"), mesh=ABC)
    (step,) = conversion(source, target, 4)
    assert (step.kind, step.received) == ("permute", (("a", 64),))
    assert _layout.permutation(step) == [(0, 0), (1, 2), (2, 1), (3, 3)]
    check_run(ABC, source, target)


NODES = {"node": 4, "local": 8}
TIMES = axis_times(NODES, find_target("tests", "h200"), Topology(4, 8))


@pytest.mark.parametrize(
    ("rows", "kinds"),
    [(64, ["gather", "scatter"]), (2**22, ["scatter", "gather", "exchange"])],
)
def test_small_values_take_few_collectives_and_large_ones_few_bytes(rows, kinds):
    source = lay((rows, 8), (0, "node"), Partial("local"), mesh=NODES)
    steps = conversion(source, lay((rows, 8), (0, "local"), mesh=NODES), 4, TIMES)
    assert [s.kind for s in steps if s.kind not in LOCAL] == kinds


ALIKE = tuple((axis, AxisTimes(1000, 3, 5)) for axis in ABC)
TIES = """
import itertools
import conftest, test_ir_layout as t
dims = [(0, x) for x in "ab"] + [(1, x) for x in "ab"]
layouts = [t.lay((8, 4), *cuts, mesh=t.ABC) for n in range(3) for cuts in itertools.combinations(dims, n)
           if len({axis for _, axis in cuts}) == n]
for a, b in itertools.product(layouts, layouts):
    print(a, b, [(s.kind, s.axes, str(s.after)) for s in t.conversion(a, b, 4, t.ALIKE)])
"""


@pytest.mark.slow
def test_every_process_breaks_ties_alike():
    text = partitioned.printed_by_processes(TIES)
    assert "exchange" in text
    assert len(text.splitlines()) == 81


def test_no_detour_is_cheaper():
    """Over every layout in between, where no replicated value becomes a partial sum."""
    of_a, of_b = ([(0, x), (1, x), Partial(x)] for x in "ab")
    found = [lay((8, 4), *cuts, mesh=ABC) for cuts in itertools.product(of_a, of_b)]
    for source, target in itertools.product(found, found):
        if {*target.partial} <= {*source.partial}:
            least = sum(received(conversion(source, target, 4)).values())
            for middle in found:
                there = [*conversion(source, middle, 4), *conversion(middle, target, 4)]
                assert sum(received(there).values()) >= least, f"{source} {middle} {target}"


SPECS = [
    P(), P("data"), P(None, "data"), P(("data", "model")), P("model", "data"), P(("model", "data"), None)
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
def test_a_partition_spec_comes_and_goes(spec):
    """Blocks are those of `NamedSharding`; where it does not divide, of the padded value."""
    mesh = small.auto_mesh(data=4, model=2)
    for shape in ((16, 8), (9, 6), (1, 1)):
        layout = _layout.from_spec(shape, MESH, spec)
        assert layout.shape == shape
        assert (written := layout.spec()) is not None
        assert P(*written) == P(*spec, *[None] * (2 - len(spec)))
        sharding = jax.NamedSharding(mesh, written)
        padded = tuple(dim.size for dim in layout.dims)
        held = sharding.devices_indices_map(padded)
        whole = np.arange(math.prod(padded)).reshape(padded)
        inside = whole[tuple(slice(n) for n in shape)]
        for device, at in zip(devices(MESH), mesh.devices.flat, strict=True):
            block = whole[held[at]]
            assert layout.local_shape == block.shape == sharding.shard_shape(padded)
            own = held_by(layout, inside, device, -1)
            np.testing.assert_array_equal(own, np.where(np.isin(block, inside), block, -1))


def test_what_a_reshape_loses():
    rows = lay((4, 10), (0, "model"), (1, "data"))
    assert str(rows.reshapable((8, 5))) == "[4@model, 10]"
    assert str(rows.reshapable((2, 20))) == "[4@model, 10+2@data]"
    assert str(rows.reshape((2, 20))) == "[2@model, 2*(10+2)@2,data]"
    assert str(rows.without(["data"])) == "[4@model, 10]"
    both = lay((2, 3), (0, "a"), (1, "b"), mesh={"b": 2, "a": 3})
    assert str(both) == "[2+1@a, 3+1@b]"
    assert str(both.reshapable((6,))) == "[2, 3]"
    assert str(lay((0, 3), (1, "data")).reshapable((3, 0))) == "[0, 3]"
    assert str(lay((1, 0), (0, "data")).reshapable((1, 0, 1))) == "[1, 0]"
