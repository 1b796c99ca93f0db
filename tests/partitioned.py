"""Steps that are partitioned, and run on 8 CPU devices, for the tests of the partitioner."""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import AxisType, NamedSharding

from jzero.ir._layout import Layout, from_spec, replicated
from jzero.ir._regions import trip_count
from jzero.ir._starts import in_bounds
from jzero.sharding.partition._partition import DeviceInput, DeviceProgram, partition
from jzero.tracing import _jaxpr, _rewrite


def printed_by_processes(script: str) -> str:
    """What a script prints in processes with other orders of sets, which must be the same."""
    folder, found = pathlib.Path(__file__).parent, set()
    for seed in ("0", "77"):
        env = {
            **os.environ, "PYTHONHASHSEED": seed,
            "PYTHONPATH": os.pathsep.join(map(str, (folder, folder.parent))),
        }  # fmt: skip
        run = subprocess.run(
            [sys.executable, "-c", script], env=env, cwd=folder, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        found.add(run.stdout)
    (text,) = found
    return text


@dataclasses.dataclass
class Case:
    """A step, and what of its state is a parameter: what is below the key 'p'."""

    init: Any
    step: Any
    batch: Any
    mesh: dict[str, int]
    stage: int
    specs: Any = None  # of a parameter's path and shape: further axes
    rows: tuple[str, ...] = ("data",)
    spec: P | None = None  # of the batch, if it is not sharded along dim 0 only


@dataclasses.dataclass
class Ready:
    program: DeviceProgram
    run: Any
    place: Any
    mesh: Any


def roles(state):
    """For each leaf the parameter that it is, or belongs to, by path; None for other leaves."""
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    leaves = jax.tree.leaves(state)
    params = {
        p.removeprefix("['p']"): x
        for p, x in zip(paths, leaves, strict=True)
        if p.startswith("['p']")
    }
    found = []
    for path, x in zip(paths, leaves, strict=True):
        ends = [k for k, p in params.items() if path.endswith(k) and p.shape == x.shape]
        found.append((max(ends, key=len) if ends else None, path.startswith("['p']")))
    return found


def sharded(layout, axes):
    """Further cut over axes: along the first dim that is a quarter of the largest, and no loop's; padded."""
    shape = layout.shape
    free = [d for d, dim in enumerate(layout.dims) if not dim.cuts and dim.true > 1] or []
    axes = [a for a in axes if layout.place(a) is None]
    if not free or not axes:
        return layout
    if len(shape) > 2 and len(free) > 1 and 0 in free:
        free = [d for d in free if d]  # Stacked layers stay whole.
    n = layout.num(axes)
    even = [d for d in free if shape[d] % n == 0] or free
    d = next(d for d in even if 4 * shape[d] >= max(shape[d] for d in even))
    for axis in axes:
        layout = layout.cut(d, axis)
    return layout


def layouts(case: Case, state):
    """Layouts of the state, and the axes over which each leaf is firm."""
    found, firm = [], []
    for (name, is_param), x in zip(roles(state), jax.tree.leaves(state), strict=True):
        shape = np.shape(x)
        layout = replicated(shape, case.mesh)
        axes: frozenset[str] = frozenset()
        if name is not None and case.specs is not None:
            layout = from_spec(shape, case.mesh, case.specs(name, shape))
            axes = frozenset(c.axis for d in layout.dims for c in d.cuts)
        if case.stage == 3 or case.stage and not is_param:
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                layout = sharded(layout, case.rows)
        found.append(layout)
        firm.append(axes)
    return found, firm


def traced(case: Case):
    state, batch = jax.eval_shape(case.init), case.batch
    leaves, tree = jax.tree.flatten((state, batch))

    def flat(*args):
        return jax.tree.leaves(case.step(*jax.tree.unflatten(tree, args)))

    found = _jaxpr.trace_whole(flat, [*map(_struct, leaves)], {})
    return _rewrite.flatten_calls(in_bounds(found.jaxpr), found.consts), state, leaves


def _struct(x):
    return jax.ShapeDtypeStruct(
        np.shape(x), jnp.result_type(x), weak_type=getattr(x, "weak_type", False)
    )


def prepare(case: Case) -> Ready:
    (jaxpr, consts), state, leaves = traced(case)
    stored, firm = layouts(case, state)
    num = len(stored)
    ins = [DeviceInput(layout, firm=axes) for layout, axes in zip(stored, firm, strict=True)]
    for x in leaves[num:]:
        spec = (case.spec or P(case.rows)) if np.ndim(x) else P()
        layout = from_spec(np.shape(x), case.mesh, spec)
        ins.append(DeviceInput(layout, rows=frozenset(case.rows if np.ndim(x) else ())))
    outs = [*stored, *[None] * (len(jaxpr.outvars) - num)]
    program = partition(jaxpr, consts, case.mesh, ins, outs, keeps_padding=True)
    mesh = jax.make_mesh(
        tuple(case.mesh.values()), tuple(case.mesh), axis_types=(AxisType.Auto,) * len(case.mesh),
        devices=jax.devices()[: math.prod(case.mesh.values())],
    )  # fmt: skip

    def on_device(*args):
        return _jaxpr.evaluate(program.jaxpr, program.consts, *args)

    specs = [layout.spec() for layout in program.ins]
    out_specs = [layout.spec() for layout in program.outs]
    body = jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False
    )

    def place(xs):
        found = []
        for x, layout in zip(xs, program.ins, strict=False):
            spec = layout.spec()
            assert spec is not None
            found.append(jax.device_put(padded(np.asarray(x), layout), NamedSharding(mesh, spec)))
        return found

    return Ready(program, jax.jit(body), place, mesh)


def padded(x, layout: Layout):
    """With NaN (of integers, a number out of bounds) where the layout has padding."""
    for d, dim in enumerate(layout.dims):
        if dim.pad is not None:
            more = [(0, 0)] * x.ndim
            more[d] = (0, dim.size - dim.true)
            fill = np.nan if np.issubdtype(x.dtype, np.inexact) else 7
            x = np.pad(x, more, constant_values=fill)
    return x


def unpadded(x, layout: Layout, as_given: bool = False):
    """Without its padding, which is zero, or as it was given."""
    true = np.asarray(x)[tuple(slice(dim.true) for dim in layout.dims)]
    expected = padded(true, layout) if as_given else true
    assert np.count_nonzero(np.asarray(x)) == np.count_nonzero(expected)
    return true


def train(case: Case, ready: Ready, num=3):
    """Every leaf of the state, and what else each step returns."""
    xs = ready.place([*jax.tree.leaves(case.init()), *jax.tree.leaves(case.batch)])
    start = len(jax.tree.leaves(jax.eval_shape(case.init)))
    jaxpr = ready.program.jaxpr
    unchanged = [atom in jaxpr.invars for atom in jaxpr.outvars]
    state, batch, metrics = xs[:start], xs[start:], []
    for _ in range(num):
        outs = ready.run(*state, *batch)
        state, more = outs[:start], outs[start:]
        metrics.append(
            [unpadded(x, at) for x, at in zip(more, ready.program.outs[start:], strict=True)]
        )
    return [
        *(
            unpadded(x, at, same)
            for x, at, same in zip(state, ready.program.outs, unchanged, strict=False)
        ),
        *(x for step in metrics for x in step),
    ]


def expected(case: Case, num=3):
    state, run, metrics = case.init(), jax.jit(case.step), []
    for _ in range(num):
        state, more = run(state, case.batch)
        metrics += jax.tree.leaves(more)
    return [np.asarray(x) for x in [*jax.tree.leaves(state), *metrics]]


def worst(got, want):
    """The largest difference, relative where values are large."""
    most = 0.0
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.size:
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            most = max(most, float(np.max(np.abs(x - y) / (1 + np.abs(y)))))
    return most


def moved(program: DeviceProgram) -> dict[str, tuple[int, int]]:
    """How often each kind of collective runs, and the bytes that reach a device."""
    times: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for move in program.moves:
        times[move.kind] += move.times
        nbytes[move.kind] += move.nbytes
    return {kind: (times[kind], nbytes[kind]) for kind in sorted(times)}


KINDS = {
    "all_gather": "gather", "reduce_scatter": "scatter", "all_to_all": "exchange", "psum": "reduce",
    "pmax": "reduce", "pmin": "reduce", "ppermute": "permute",
}  # fmt: skip


def collectives(jaxpr, mesh) -> dict[str, tuple[int, int]]:
    """The same as `moved`, counted in a program's equations."""
    found: dict[str, tuple[int, int]] = {}

    def walk(jaxpr, times):
        for eqn in jaxpr.eqns:
            if (kind := KINDS.get(eqn.primitive.name)) is not None:
                axes = eqn.params.get("axes") or eqn.params["axis_name"]
                n = math.prod(mesh[a] for a in ((axes,) if isinstance(axes, str) else axes))
                most = max(v.aval.size * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars))
                num, nbytes = found.get(kind, (0, 0))
                received = (2 if kind == "reduce" else 1) * most * (n - 1) // n
                found[kind] = num + times, nbytes + times * received
            for inner in _jaxpr.inner_jaxprs(eqn):
                walk(_jaxpr.open_jaxpr(inner)[0], times * (trip_count(eqn) or 1))

    walk(jaxpr, 1)
    return dict(sorted(found.items()))


# -- functions of a few arrays ----------------------------------------------------------------------
DATA, SQUARE, ROWS = {"data": 8}, (16, 16), P("data")


def program(fn, *specs, outs=None, mesh=None, whole=()):
    """One device's program of a function of a state, and of arrays with rows over all axes that cut them.

    `specs` are shapes and specs; those at `whole` come whole to each device.
    """
    mesh = mesh or DATA
    avals = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape, _ in specs]
    traced = _jaxpr.trace_whole(fn, avals, {})
    jaxpr, consts = _rewrite.flatten_calls(traced.jaxpr, traced.consts)
    ins = []
    for i, (shape, spec) in enumerate(specs):
        layout = from_spec(shape, mesh, spec)
        rows = frozenset(cut.axis for dim in layout.dims for cut in dim.cuts) if i else frozenset()
        ins.append(DeviceInput(layout, rows, padded_dims_gathered=i in whole))
    return partition(
        jaxpr, consts, mesh, ins, outs or [None] * len(jaxpr.outvars), keeps_padding=True
    )


def kinds(found):
    return [m.kind for m in found.moves]


def run_and_compare(fn, *specs, outs=None, mesh=None, whole=()):
    """What a program returns against `jax.jit`; padding is NaN. Returns the program."""
    values = [np.random.RandomState(i).randn(*shape) for i, (shape, _) in enumerate(specs)]
    found, sizes = program(fn, *specs, outs=outs, mesh=mesh, whole=whole), mesh or DATA
    on = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )  # fmt: skip
    body = jax.shard_map(
        lambda *a: _jaxpr.evaluate(found.jaxpr, found.consts, *a), mesh=on, check_vma=False,
        in_specs=tuple(x.spec() for x in found.ins), out_specs=[x.spec() for x in found.outs],
    )  # fmt: skip
    ins = [padded(x, layout) for x, layout in zip(values, found.ins, strict=True)]
    got = [unpadded(x, at) for x, at in zip(jax.jit(body)(*ins), found.outs, strict=True)]
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*values))]
    assert worst(got, want) < 1e-12
    return found
