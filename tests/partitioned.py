"""Functions that are partitioned, and run on CPU devices, for the tests of the partitioner."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

import small
from jzero.ir._layout import Layout, from_spec
from jzero.sharding.partition._partition import DeviceInput, partition
from jzero.tracing import _jaxpr, _rewrite, _traces


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


def padded(x, layout: Layout):
    """With NaN (of integers, a number out of bounds) where the layout has padding."""
    for d, dim in enumerate(layout.dims):
        if dim.pad is not None:
            more = [(0, 0)] * x.ndim
            more[d] = (0, dim.size - dim.true)
            fill = np.nan if np.issubdtype(x.dtype, np.inexact) else 7
            x = np.pad(x, more, constant_values=fill)
    return x


def unpadded(x, layout: Layout):
    """Without its padding, which is zero."""
    true = np.asarray(x)[tuple(slice(dim.true) for dim in layout.dims)]
    assert np.count_nonzero(np.asarray(x)) == np.count_nonzero(true)
    return true


def worst(got, want):
    """The largest difference, relative where values are large."""
    most = 0.0
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.size:
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            most = max(most, float(np.max(np.abs(x - y) / (1 + np.abs(y)))))
    return most


DATA, SQUARE, ROWS = {"data": 8}, (16, 16), P("data")


def program(fn, *specs, outs=None, mesh=None, whole=()):
    """One device's program of a function of a state, and of arrays with rows over all axes that cut them.

    `specs` are shapes and specs; those at `whole` come whole to each device.
    """
    mesh = mesh or DATA
    avals = [jax.ShapeDtypeStruct(shape, jnp.float64) for shape, _ in specs]
    traced = _traces.trace_whole(fn, avals, {})
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
    body = jax.shard_map(
        lambda *a: _jaxpr.evaluate(found.jaxpr, found.consts, *a), mesh=small.auto_mesh(**sizes),
        in_specs=tuple(x.spec() for x in found.ins), out_specs=[x.spec() for x in found.outs],
        check_vma=False,
    )  # fmt: skip
    ins = [padded(x, layout) for x, layout in zip(values, found.ins, strict=True)]
    got = [unpadded(x, at) for x, at in zip(jax.jit(body)(*ins), found.outs, strict=True)]
    want = [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*values))]
    assert worst(got, want) < 1e-12
    return found
