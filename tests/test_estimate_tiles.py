"""`estimate` with `tile_bytes`: against what was compiled for H200s, and what it refuses."""

import json
import pathlib
from typing import Any

import pytest

import jzero
from small import grouped

RESULTS = pathlib.Path(__file__).parents[1] / "experiments" / "tiling" / "results"
GB = 10**9


def compiled(name):
    """A result of experiments/tiling: the number of parameters, and the programs by their tiles' bytes."""
    (path,) = RESULTS.glob(f"*-{name}.json")
    found = json.loads(path.read_text())
    return found["parameters"], {program["tile_bytes"]: program for program in found["programs"]}


@pytest.mark.parametrize(
    ("name", "devices", "activations", "most"),
    [
        # An activation of each layer in bfloat16; beside them one layer's own, and the logits.
        ("127x25600-1024-blocks-in-parts", 1024, 127 * 1024 * 25_600 * 2, 1.7 * GB),
        ("127x25600-1024-blocks-whole", 1024, 127 * 1024 * 25_600 * 2, 3.5 * GB),
        ("16x4096-64-blocks-whole", 64, 16 * 1024 * 4096 * 2, 0.7 * GB),
    ],
)
@pytest.mark.parametrize("tile_bytes", [2**26, 2**24])
def test_memory_of_compiled_programs(name, devices, activations, most, tile_bytes):
    num_params, programs = compiled(name)
    found = jzero.estimate(num_params, devices=devices, comm=jzero.Comm(tile_bytes=tile_bytes))
    program = programs[tile_bytes]
    assert found.at_rest == pytest.approx(program["at_rest"], rel=1e-3)
    told = found.total - found.at_rest + activations
    assert 0 < program["within"] - told < most
    # Whole, the gradient of the largest matrix and the gathers ahead of it: more than all that is left.
    assert programs[None]["within"] - program["within"] > 0.3 * GB


def rows(**options):
    found = jzero.estimate("1B", devices=8, **grouped(tile_bytes=2**26, **options))
    return {row.role: row.per_device for row in found.memory if "tile" in row.role}


def test_rows_of_tiles():
    both = {"gathered tile": 2**27, "tile of a gradient": 2**27}
    assert rows() == both
    assert rows(stage=2) == {"tile of a gradient": 2**27}
    # Sums of microbatches that are reduced once are whole; a window has its gathered tiles in it.
    assert rows(accumulate=4, reduce="once") == {"gathered tile": 2**27}
    window = {"offload_params": jzero.PinnedHost(2**30), "offload": jzero.HostCPU()}
    assert rows(**window) == {"tile of a gradient": 2**27}
    small = jzero.estimate(1000, devices=8, comm=jzero.Comm(tile_bytes=2**26))
    assert small.nbytes("gathered tile") == 2000


def test_a_pass_gathers_for_itself():
    rates: dict[str, Any] = {"tokens": 1024, "peak": "989TFLOP/s", "interconnect": "400GB/s"}
    found = jzero.estimate("1B", devices=8, **grouped(tile_bytes=2**26, **rates))
    assert found.time is not None
    ways = {part.name: part.ways for part in found.time.parts}
    forward, backward = (
        ways[name]["between devices"] for name in ("forward pass", "backward pass")
    )
    assert backward == pytest.approx(3 * forward)  # twice, and gradients are as many


@pytest.mark.parametrize("tile_bytes", [0, -1, 1.5, "a lot", True])
def test_what_is_no_size_is_refused(tile_bytes):
    with pytest.raises(jzero.OptionError, match="Comm: tile_bytes=.*an int from 1"):
        jzero.estimate("1B", devices=8, comm=jzero.Comm(tile_bytes=tile_bytes))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stage": 0}, r"estimate: stage=0 and Comm\(tile_bytes=67108864\)"),
        ({"gather": "keep"}, "Comm: gather='keep' and tile_bytes=67108864"),
    ],
)
def test_refused_as_a_step_refuses_it(options, text):
    with pytest.raises(jzero.OptionError, match=text):
        jzero.estimate("1B", devices=8, **grouped(tile_bytes=2**26, **options))
