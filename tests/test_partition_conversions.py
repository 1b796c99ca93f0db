"""Conversions as one device's equations, on 8 devices; what a layout means is tested in test_ir_layout.py."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from jax import P

import small
import test_ir_layout as layouts
from jzero.ir._layout import LOCAL, Layout, conversion
from jzero.sharding.partition._writer import DeviceMove, DeviceWriter
from jzero.tracing import _jaxpr
from jzero.tracing._types import Var
from layout_blocks import received


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


def check(mesh, source, target):
    moves: dict[Var, DeviceMove] = {}
    run = program(source, target, mesh, moves)
    value = layouts.value_of(source.shape)
    blocks = layouts.terms_of(source, value, mesh)
    stacked = np.stack(blocks).reshape(*mesh.values(), *source.local_shape)
    out = np.asarray(run(stacked)).reshape(-1, *target.local_shape)
    np.testing.assert_array_equal(layouts.assembled(target, list(out), mesh), value)
    steps = [s for s in conversion(source, target, 4) if s.kind not in LOCAL]
    assert sum(m.nbytes for m in moves.values()) == sum(received(steps).values())
    assert [(m.kind, m.axes) for m in moves.values()] == [(s.kind, s.axes) for s in steps]


@given(layouts.cases(num=2))
@settings(max_examples=60)
def test_conversions_run_on_devices(case):
    check(*case)


DATA, MODEL = {"data": 8}, {"data": 4, "model": 2}
lay = layouts.lay


@pytest.mark.parametrize(
    ("mesh", "source", "target"),
    [
        # Dealt out to contiguous, both ways, within one dim.
        (DATA, lay((64, 3), (0, "data", 2), mesh=DATA), lay((64, 3), (0, "data", 8), mesh=DATA)),
        (DATA, lay((64, 3), (0, "data", 8), mesh=DATA), lay((64, 3), (0, "data"), mesh=DATA)),
        (MODEL, lay((16, 8), (0, "data", 2)), lay((16, 8), (1, "data", 2))),
    ],
)
def test_exchanges_run_on_devices(mesh, source, target):
    check(mesh, source, target)
