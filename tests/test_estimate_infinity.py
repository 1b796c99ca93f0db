"""estimate() with parameters and activations on the hosts: bytes, traffic, the time of a step, messages."""

import json
import math
from typing import Any

import pytest

import jzero
from jzero._quantities import (
    parse_flops,
    parse_rate,
    readable_flops,
    readable_rate,
    readable_seconds,
)
from jzero.reports._step_time import StepTime
from small import grouped

PSI = 10**9
PARAMS = jzero.PinnedHost(2**30)
NODES: Any = {"node": 2, "local": 4}
RATES: dict[str, Any] = {"tokens": "8K", "peak": "989TFLOP/s", "pcie": "55GB/s"}
KEPT: dict[str, Any] = {
    "offload_activations": jzero.PinnedHost(),
    "layers": 24,
    "width": 2048,
    "tokens": 4096,
}


def estimate(**options: Any) -> jzero.Estimate:
    defaults = {"offload": jzero.HostCPU(), "offload_params": PARAMS, "devices": 8}
    return jzero.estimate(PSI, **grouped(**defaults | options))


def time_of(found: jzero.Estimate) -> StepTime:
    assert found.time is not None
    return found.time


def by_way(transfers):
    totals: dict[tuple[str, str], int] = {}
    for c in transfers:
        totals[c.direction, c.what] = totals.get((c.direction, c.what), 0) + c.nbytes
    return totals


def rows(found):
    """`{role: (bytes on each device, on its host, at rest)}`."""
    return {row.role: (row.per_device, row.on_host, row.at_rest) for row in found.memory}


# -- what crosses ----------------------------------------------------------------------------------

UP, DOWN = "to device", "to host"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Two passes fetch, gradients leave once, and what the host updates crosses no more.
        ({}, {(UP, "parameter"): 2 * 2, (DOWN, "gradient"): 2}),
        ({"precision": "float32"}, {(UP, "parameter"): 2 * 4, (DOWN, "gradient"): 4}),
        # The model casts what has come: what rests crosses, and gradients of the compute.
        ({"precision": "float32_masters"}, {(UP, "parameter"): 2 * 4, (DOWN, "gradient"): 2}),
        # Microbatch by microbatch; once, if the shards of all parameters have room.
        ({"accumulate": 4, "offload_params": jzero.PinnedHost(2**28)},
         {(UP, "parameter"): 4 * 2 * 2, (DOWN, "gradient"): 2}),
        ({"accumulate": 4}, {(UP, "parameter"): 2, (DOWN, "gradient"): 2}),
        ({"accumulate": 4, "layer_major": True}, {(UP, "parameter"): 2 * 2, (DOWN, "gradient"): 2}),
        # Devices update: the state visits with gradients, and new parameters go back.
        ({"offload": jzero.PinnedHost()},
         {(UP, "parameter"): 2 * 2, (UP, "gradient"): 2, (UP, "optimizer state"): 12,
          (DOWN, "gradient"): 2, (DOWN, "optimizer state"): 12, (DOWN, "parameter"): 2}),
        # ... without masters the update reads parameters, too.
        ({"offload": jzero.PinnedHost(), "precision": "float32"},
         {(UP, "parameter"): 3 * 4, (UP, "gradient"): 4, (UP, "optimizer state"): 8,
          (DOWN, "gradient"): 4, (DOWN, "optimizer state"): 8, (DOWN, "parameter"): 4}),
        ({"offload": jzero.NoOffload()},
         {(UP, "parameter"): 2 * 2, (UP, "gradient"): 2, (DOWN, "gradient"): 2, (DOWN, "parameter"): 2}),
        ({"devices": 1}, {(UP, "parameter"): 8 * 2 * 2, (DOWN, "gradient"): 8 * 2}),
        # Replicas: each node's devices have all of it.
        ({"devices": NODES, "param_axes": "local", "optimizer_axes": "local"},
         {(UP, "parameter"): 2 * 2 * 2, (DOWN, "gradient"): 2 * 2}),
        # On one device nothing is sharded.
        ({"devices": 1, "stage": 0}, {(UP, "parameter"): 8 * 2 * 2, (DOWN, "gradient"): 8 * 2}),
    ],
    ids=str,
)  # fmt: skip
def test_what_crosses(options, expected):
    """Bytes for each parameter of an eighth."""
    found = by_way(estimate(**options).transfers)
    assert found == {key: size * PSI // 8 for key, size in expected.items()}


def test_layer_major_gathers_and_reduces_once():
    plain, each, once = (estimate(**options) for options in (
        {}, {"accumulate": 4}, {"accumulate": 4, "layer_major": True}))  # fmt: skip
    assert once.traffic == plain.traffic
    assert each.elements("all-gather") == 4 * once.elements("all-gather") == 8 * PSI
    assert each.elements("reduce-scatter") == 4 * once.elements("reduce-scatter") == 4 * PSI


# -- what is held ----------------------------------------------------------------------------------


def test_no_model_state_is_on_the_device_but_the_window():
    small, large = (
        jzero.estimate(n, devices=8, memory=jzero.Memory(optimizer=jzero.HostCPU(), params=PARAMS))
        for n in (PSI, 100 * PSI)
    )
    assert rows(small) == {
        "parameter": (0, 2 * PSI // 8, True),
        "optimizer state": (0, 12 * PSI // 8, True),
        "gradient": (0, 2 * PSI // 8, False),
        "streamed parameter": (2**30, 0, False),
    }
    assert small.at_rest == large.at_rest == 0
    assert small.total == large.total == 2**30
    assert large.on_host == 100 * small.on_host == 16 * 100 * PSI // 8


def test_a_window_is_no_larger_than_what_visits():
    """A shard, and all of it gathered; on one device nothing is gathered."""
    wide = jzero.PinnedHost(2**40)
    assert estimate(offload_params=wide).total == 2 * PSI // 8 + 2 * PSI
    assert estimate(offload_params=wide, devices=1).total == 2 * PSI


def test_the_host_bounds_the_largest_model():
    """16 bytes a parameter: 12 of state, 2 of parameter, 2 of gradient."""
    found = estimate()
    num = found.largest_model("80GB", host_memory="160GB")
    assert num == 8 * 160 * 10**9 // 16
    with_state = estimate(offload=jzero.NoOffload())
    assert with_state.largest_model("80GB", "160GB") == with_state.largest_model("80GB")


# -- time ------------------------------------------------------------------------------------------


def test_the_arithmetic_of_pinned_parameters():
    """Over 55 GB/s and at 989 TFLOP/s: 2 bytes hide behind 2 operations, in the backward pass behind 6."""
    for num in (1, 8, 64):
        found = time_of(estimate(devices=num, **RATES))
        whole = 989e12 / 55e9
        assert found.hides_from == {
            "forward pass": math.ceil(whole / num),
            "backward pass": math.ceil(whole / 3 / num),
        }
        # Of a whole step 4 bytes come, and 8 operations run: about 9000 tokens over the devices.
        assert 4 / 8 * whole == pytest.approx(8991, abs=1)
    plain = time_of(estimate(recompute=False, **RATES))
    assert plain.hides_from["backward pass"] == math.ceil(989e12 / 55e9 / 2 / 8)


@pytest.mark.parametrize(
    "options",
    [{}, {"interconnect": "300GB/s"}, {"accumulate": 3}, {"precision": "float32"}, KEPT,
     {"accumulate": 2, "layer_major": True, **KEPT}, {"offload": jzero.PinnedHost()}],
    ids=str,
)  # fmt: skip
def test_what_hides_from_so_many_tokens_does_and_from_fewer_does_not(options):
    def exposed(name, tokens):
        parts = time_of(estimate(**{**RATES, **options, "tokens": tokens})).parts
        return next(part.exposed for part in parts if part.name == name)

    for name, least in time_of(estimate(**RATES | options)).hides_from.items():
        assert least is not None
        assert least > 1
        assert exposed(name, least) == 0
        assert exposed(name, least - 1) > 0


def test_what_grows_with_the_tokens_never_hides_behind_a_thin_layer():
    """Per token 2 * 24 * 2048 bytes of activations, and 2 * 10**6 operations."""
    kept = {**KEPT, "offload": jzero.NoOffload(), "offload_params": jzero.NoOffload()}
    found = time_of(jzero.estimate("1M", devices=8, **grouped(**RATES | kept)))
    assert found.hides_from == {"forward pass": None, "backward pass": None}
    assert "forward pass moves more for each token than its compute" in " ".join(str(found).split())


def test_what_grows_with_the_tokens_hides_behind_a_wide_layer():
    kept = {**KEPT, "offload": jzero.NoOffload(), "offload_params": jzero.NoOffload()}
    found = time_of(estimate(**RATES | kept))
    assert found.hides_from == {"forward pass": 0, "backward pass": 0}
    assert "forward pass hides its traffic with any number of tokens." in " ".join(
        str(found).split()
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"offload_params": jzero.NoOffload()}, {"offload": jzero.PinnedHost(), "accumulate": 2}, KEPT,
     {"offload": jzero.PinnedHost(), "offload_params": jzero.NoOffload(), "stage": 1},
     {"devices": NODES, "param_axes": "local", "optimizer_axes": "local"},
     {"devices": NODES, "param_axes": "local", "offload_params": jzero.NoOffload()},
     {"offload_params": jzero.NoOffload(), "gather": "keep", "accumulate": 2}],
    ids=str,
)  # fmt: skip
def test_every_byte_has_its_time(options):
    """Over all parts, what crosses and what devices exchange."""
    rates = {**RATES, "interconnect": "350GB/s"}
    found = estimate(**rates | options)
    seconds: dict[str, float] = {}
    for part in time_of(found).parts:
        for way, time in part.ways.items():
            seconds[way] = seconds.get(way, 0) + time
    for way in (UP, DOWN):
        nbytes = sum(c.nbytes for c in found.transfers if c.direction == way)
        assert seconds.get(way, 0) == pytest.approx(nbytes / 55e9)
    moved = sum(c.nbytes * (1 + (c.op == "all-reduce")) for c in found.traffic)
    assert seconds["between devices"] == pytest.approx(moved / 350e9)
    assert time_of(found).compute == pytest.approx(8 * PSI * (found.workload.tokens or 0) / 989e12)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"stage": 0}, {"backward pass": 2}),
        ({"stage": 1}, {"backward pass": 1, "update": 1}),
        ({"stage": 2, "accumulate": 2}, {"backward pass": 2, "update": 1}),
        ({"stage": 3}, {"forward pass": 1, "backward pass": 2}),
        ({"stage": 3, "accumulate": 2, "gather": "keep"}, {"forward pass": 2, "backward pass": 2}),
        ({"stage": 3, "accumulate": 2}, {"forward pass": 2, "backward pass": 4}),
    ],
    ids=str,
)
def test_what_devices_exchange_in_which_part(options, expected):
    """Seconds for a whole value in 16 bits."""
    rates: Any = {"tokens": 1, "peak": 1, "interconnect": 2 * PSI}
    found = time_of(jzero.estimate(PSI, devices=8, **grouped(**rates | options)))
    assert {p.name: p.ways["between devices"] for p in found.parts if p.ways} == expected


def test_parts_of_a_step():
    """All ways at the same time: the slowest of them counts, and what compute hides does not."""
    rates = {"peak": "100TFLOP/s", "pcie": "10GB/s", "host_update": "50GB/s"}
    found = time_of(estimate(tokens=1000, **rates))
    forward, backward = found.parts
    assert (forward.compute, backward.compute) == (0.02, 0.06)
    assert forward.ways == {UP: 0.025}
    # The host updates a layer while devices compute the one before it.
    assert backward.ways == {UP: 0.025, DOWN: 0.025, "host update": 0.03}
    assert found.exposed == pytest.approx(0.005)
    assert found.seconds == pytest.approx(0.08 + 0.005)
    assert found.efficiency == pytest.approx(0.08 / 0.085)
    assert found.untimed == ("between devices",)


def test_a_delayed_update_hides_behind_the_passes():
    """It takes 0.03 or 0.15 s, and the passes 0.08; new parameters come in 0.025."""
    rates = {"tokens": 1000, "peak": "100TFLOP/s", "pcie": "10GB/s"}
    policies: Any = {
        "offload": jzero.HostCPU(delayed_update=True),
        "offload_params": jzero.NoOffload(),
    }
    slow, fast = (
        time_of(estimate(host_update=r, **policies, **rates)) for r in ("10GB/s", "50GB/s")
    )
    assert (fast.exposed, fast.seconds) == (0, pytest.approx(0.08))
    assert slow.exposed == pytest.approx(0.15 - 0.08)


# -- what is printed, and messages -----------------------------------------------------------------


def test_what_is_printed_fits_and_is_in_the_dict():
    found = estimate(accumulate=2, interconnect="350GB/s", host_update="4GB/s", **RATES | KEPT)
    for width in (80, 60):
        assert max(map(len, found.lines(width))) <= width
    text = " ".join(str(found).split())
    for part in ("streamed parameter 1.0 GiB 1.0 GiB 0 B at a time, gathered ones included",
                 "to device parameter 16-bit 125,000,000 238.4 MiB", "pinned, of one microbatch",
                 "The forward pass hides its traffic with", "Rates: 55 GB/s in each direction between",
                 "350 GB/s of a whole value", "4 GB/s of optimizer state"):  # fmt: skip
        assert part in text, part
    time = time_of(found)
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["time"]["seconds"] == time.seconds
    assert [part["part"] for part in numbers["time"]["parts"]] == [p.name for p in time.parts]
    assert numbers["time"]["hides_from_tokens"] == time.hides_from
    assert numbers["time"]["rates"]["pcie"] == 55 * 10**9


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("55GB/s", 55 * 10**9), (" 1.5 GiB/s ", 3 * 2**29), ("400Gb/s", None), ("55gb/s", None),
     ("55GB", None), ("55", None), (0, None), (None, None), ("B/s", None)],
)  # fmt: skip
def test_rates(value, expected):
    assert parse_rate(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(5, 5), ("989TFLOP/s", 989 * 10**12), ("989 TFLOPS", 989 * 10**12), ("1.5PFlops", 15 * 10**14),
     ("70TFLOPs", 70 * 10**12), ("989T", None), ("989TOPS", None), (-1, None), (None, None)],
)  # fmt: skip
def test_operations_per_second(value, expected):
    assert parse_flops(value) == expected


def test_readable_rates():
    rates = ", ".join(readable_rate(n) for n in (55e9, 1.234e12, 999))
    assert rates == "55 GB/s, 1.23 TB/s, 999 B/s"
    assert readable_flops(989e12) == "989 TFLOP/s"
    seconds = "; ".join(readable_seconds(n) for n in (1234, 12.34, 0.0123, 1.2e-5, 1e-9, 0))
    assert seconds == "1,234 s; 12.3 s; 12.3 ms; 12 us; 0.001 us; 0 s"


PINNED = jzero.PinnedHost()


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"offload_params": jzero.HostCPU()}, "or in files. Use Memory(params=jzero.PinnedHost(dev"),
        ({"offload_activations": True}, "Memory: activations=True. It is a policy, or one of"),
        ({"recompute": None}, "Workload: recompute=None. It is True or False. Drop it."),
        ({"stage": 2}, "estimate: Memory(params=PinnedHost()), and parameters"),
        ({"gather": "keep"}, "estimate: Comm(gather='keep') and Memory(params="),
        ({"devices": NODES, "param_axes": "local"}, "estimate: Memory(params=PinnedHost("),
        ({"offload": jzero.HostCPU(ratio=0.5)}, "The host updates all parameters in their place, when the"),
        ({"offload": jzero.HostCPU(delayed_update=True)}, "Drop delayed_update and ratio, or Memory("),
        ({"accumulate": 2, "reduce": "once"}, "Microbatches(reduce='once') and Memory(params=). Gradients"),
        ({"offload_params": jzero.NoOffload(), "accumulate": 2, "layer_major": True},
         "estimate: Microbatches(order='layer') without Memory(params=). It is for layers that"),
        ({"layer_major": True}, "Microbatches: order='layer' and num=1. It is about several"),
        ({"offload_activations": PINNED, "recompute": False},
         "estimate: Memory(activations=) and Workload(recompute=False). What layers save without"),
        ({"offload_activations": PINNED, "tokens": 8},
         "estimate: Memory(activations=) without layers and without width. What a loop saves is the"),
        ({"layers": 8, "width": "2K"}, "Workload(layers=8, width=2000) without Memory(activations=)."),
        ({"tokens": 1.5, "layers": 0}, "Workload: 2 fields fail:\n  - tokens=1.5\n  - layers=0"),
        ({"peak": "989T"}, "Rates: peak='989T'. It is operations per second, a whole number"),
        ({"pcie": "400Gb/s"}, "pcie='400Gb/s'. It is bytes per second, a whole number from 1 or a string"),
        ({"interconnect": 0}, "interconnect=0. It is bytes per second, a whole number from 1 or a string "
         "such as '55GB/s'; a capital B is a byte. Write Rates(interconnect='350GB/s')."),
        ({"pcie": "55GB/s"}, "estimate: Rates(pcie='55GB/s') without peak and without tokens. A"),
        ({"peak": "1TFLOP/s"}, "estimate: Rates(peak='1TFLOP/s') without tokens. A step takes the time"),
        ({"tokens": 8192}, "estimate: Workload(tokens=8192) without peak. Bytes do not depend on them; the"),
        ({"offload": jzero.PinnedHost(), **RATES, "host_update": "4GB/s"},
         "estimate: Rates(host_update='4GB/s'), and nothing moves at such a rate. pcie is for state"),
        ({"devices": 1, **RATES, "interconnect": "4GB/s"}, "interconnect='4GB/s'), and nothing moves"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_estimated(args, text):
    with pytest.raises(jzero.OptionError) as caught:
        estimate(**args)
    assert text in str(caught.value)


def test_what_nothing_bounds():
    with pytest.raises(
        jzero.OptionError, match=r"memory='80GB' with all model states on the hosts\."
    ):
        estimate().largest_model("80GB")
    with pytest.raises(
        jzero.OptionError, match=r"estimate: host_memory='x'\. The memory of a device"
    ):
        estimate().largest_model("80GB", "x")
