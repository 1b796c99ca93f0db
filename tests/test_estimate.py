"""estimate() against describe() of a real step, optax's own state, the paper's theory, and wrong numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero._quantities import parse_bytes, parse_count, readable_count
from jzero.reports._sizes import OPTIMIZERS, PRECISIONS
from small import grouped

NODES = {"node": 2, "local": 4}


TX = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw": optax.adamw(0.1),
    "lion": optax.lion(0.1),
    "adafactor": optax.adafactor(0.1),
    "muon": optax.contrib.muon(0.1),
}
WRAPPERS = {
    "mixed": (jnp.bfloat16, jzero.master_weights),
    "float32": (jnp.float32, lambda tx: tx),
    "float32_masters": (jnp.float32, lambda tx: tx),
    "stochastic": (jnp.bfloat16, jzero.stochastic_rounding),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_presets_are_what_optax_allocates(name, precision):
    dtype, wrap = WRAPPERS[precision]
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), dtype)}
    state = jax.eval_shape(wrap(TX[name]).init, params)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    found = jzero.estimate(2**20, devices=1, optimizer=name, precision=precision)
    assert found.nbytes("parameter") == 2**20 * jnp.dtype(dtype).itemsize
    # Counters aside; 'adafactor' is an upper bound.
    assert found.nbytes("optimizer state") == pytest.approx(nbytes, abs=0.01 * 2**20)
    assert found.nbytes("optimizer state") >= nbytes - 64


# -- the paper -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "volume"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_communication_volume(stage, volume):
    """ZeRO, section 7.2: 2 Psi, and 3 Psi at stage 3."""
    found = jzero.estimate("1B", devices=64, stage=stage)
    assert found.elements_moved == volume * 10**9
    assert found.elements("all-gather") == {0: 0, 1: 1, 2: 1, 3: 2}[stage] * 10**9


def test_bytes_of_one_gpt2():
    """ZeRO, section 3.1: 1.5B parameters need at least 24 GB with Adam in mixed precision."""
    found = jzero.estimate("1.5B", devices=1, stage=0)
    roles = {row.role: row.per_device for row in found.memory}
    expected = {"parameter": 3, "gradient": 3, "optimizer state": 18}
    assert roles == {role: size * 10**9 for role, size in expected.items()}
    assert found.total == 24 * 10**9
    assert found.at_rest == 21 * 10**9


# -- the largest model -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "devices": 1},
        {"stage": 1, "devices": 7},
        {"stage": 2, "devices": 64, "optimizer": "adafactor"},
        {"stage": 3, "devices": 3, "accumulate": 2, "gather": "keep"},
        {"stage": 3, "devices": NODES, "param_axes": "local", "optimizer_bytes": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("memory", [1, 12_345, "1GB", "80GiB"])
def test_the_largest_model_fits_and_no_larger_one(options, memory):
    num, num_bytes = (
        jzero.estimate(1, **grouped(**options)).largest_model(memory),
        parse_bytes(memory),
    )
    assert num_bytes is not None
    assert jzero.estimate(num + 1, **grouped(**options)).total > num_bytes
    assert num == 0 or jzero.estimate(num, **grouped(**options)).total <= num_bytes


# -- what is printed -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(7, 7), (75e8, 75 * 10**8), (float("inf"), None), (float("nan"), None),
     (np.int64(7), 7), (np.float32(2**30), 2**30), (np.float64("nan"), None), (np.bool_(True), None),
     ("7", 7), ("7.5B", 75 * 10**8), ("350m", 350 * 10**6), (" 1 T ", 10**12), ("0.5K", 500),
     ("7.5E+9", 75 * 10**8), ("2e3 K", 2 * 10**6), ("7.5e0", None), ("1e", None), ("1e100", None),
     (0, None), ("-1", None), (True, None), ("7.5Q", None), ("B", None), (None, None)],
)  # fmt: skip
def test_counts(value, expected):
    assert parse_count(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(80, 80), ("80", 80), ("80B", 80), ("80GB", 80 * 10**9), ("80gib", 80 * 2**30),
     ("1.5 TiB", 3 * 2**39), ("8e10", 80 * 10**9), ("80e0GB", 80 * 10**9), ("80G", None),
     (-1, None), ("", None)],
)  # fmt: skip
def test_bytes(value, expected):
    assert parse_bytes(value) == expected


def test_numbers_of_numpy():
    """As from `np.prod(shape)`, or from a measurement."""
    whole: Any = np.int64
    fraction: Any = np.float32(6.5)
    sizes = jzero.BytesPerParam(params=whole(1), optimizer=fraction)
    found = jzero.estimate(whole(10**9), devices=8, bytes_per_param=sizes)
    assert found.nbytes("optimizer state") == 65 * 10**8 // 8
    assert found.largest_model(whole(2**35)) == found.largest_model(2**35)


def test_readable_counts():
    nums = (999, 7_500_000_000, 10**12, 128_001_234)
    assert [readable_count(n) for n in nums] == ["999", "7.5B", "1T", "128M"]


@pytest.mark.parametrize("stage", [0, 3])
def test_model_parallelism_divides_what_a_device_has_and_moves(stage):
    one, eight = (
        jzero.estimate(
            "8B",
            devices=64,
            stage=stage,
            model_parallel=k,
            workload=jzero.Workload(tokens="8K"),
            rates=jzero.Rates(peak="1TFLOP/s"),
        )
        for k in (1, 8)
    )
    assert eight.num_devices == 512
    for role, of_one in zip(eight.memory, one.memory, strict=True):
        assert role.per_device * 8 == of_one.per_device
        assert role.whole == of_one.whole
    assert eight.elements_moved * 8 == one.elements_moved
    assert eight.time is not None
    assert one.time is not None
    assert eight.time.compute * 8 == pytest.approx(one.time.compute)
    assert eight.to_dict()["model_parallel"] == 8
    assert "over 512 devices, 8 for each part of" in str(eight)


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"model": "7.5X"}, ["estimate: model='7.5X' is not a whole number from 1", "'7.5B'"]),
        ({"devices": 0}, ["devices=0 is no int from 1"]),
        ({"devices": None}, ["devices=None is no int from 1"]),
        ({"model_parallel": 0}, ["model_parallel=0 is not an int from 1"]),
        ({"devices": {"data": 0}}, ["devices={'data': 0} is no int from 1, and does not map names of axes"]),
        ({"optimizer": ["adam"]}, ["optimizer=['adam'] is not one of"]),
        ({"precision": 16}, ["precision=16 is not one of 'mixed', 'float32'"]),
        ({"param_bytes": 0}, ["BytesPerParam: params=0 is not a number of bytes"]),
        ({"gradient_bytes": float("nan")}, ["BytesPerParam: gradients=nan is not a number"]),
        ({"model": 0, "devices": 1.5, "optimizer": "x"},
         ["estimate: 3 arguments fail:\n  - model=0", "- devices=1.5", "- optimizer='x'"]),
        ({"stage": 4}, ["estimate: stage=4. Stages are 0, 1, 2 and 3."]),
        ({"stage": 2, "gather": "keep"}, ["estimate: stage=2 and Comm(gather='keep'). Below stage 3"]),
        ({"stage": 1, "accumulate": 2, "reduce": "each"}, ["stage=1 and Microbatches(reduce='each')."]),
        ({"param_axes": "local"}, ["estimate: Axes(params=) has ['local'], and the data axes are ('data',)"]),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_cannot_be(args, text):
    with pytest.raises(ValueError, match=": ") as caught:
        jzero.estimate(**grouped(**{"model": "7.5B", "devices": 8, **args}))
    assert isinstance(caught.value, jzero.JzeroError)
    for part in text:
        assert part in str(caught.value)


@pytest.mark.parametrize("memory", ["80G", 0, None, 1.5])
def test_memory_that_is_no_number_of_bytes(memory):
    with pytest.raises(jzero.OptionError, match=r"estimate: memory=.* a string such as '80GiB'"):
        jzero.estimate(1, devices=8).largest_model(memory)
