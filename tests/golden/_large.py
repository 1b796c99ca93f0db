"""Rows of models with half a billion parameters and more, of which nothing runs.

Models of experiments/rivals, as their authors write them: some decisions of jzero ask for sizes.
Traced, a row has the text of its program. Twenty are also compiled for the
eight H200s of a host. What XLA makes of them is kept in .cache/rivals, so that only programs that changed are
compiled again.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jzero
import small
from experiments.rivals import measure, zoo
from experiments.shared import records
from small import grouped

from ._record import Record, described, events, options_text

TOPOLOGY: dict[str, Any] = {"target": "h200", "topology": "1x8"}
ONE, TWO = {"data": 8}, {"node": 2, "local": 4}
PINNED = jzero.PinnedHost(device_bytes=2**30)


class Large(NamedTuple):
    """A model of experiments/rivals, the sizes of the mesh's axes by name, and options."""

    model: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]


LARGE = {
    "Llama, stage 0": Large("Llama", ONE, {"stage": 0}),
    "Llama, stage 1": Large("Llama", ONE, {"stage": 1}),
    "Llama, stage 2": Large("Llama", ONE, {"stage": 2}),
    "Llama, stage 3": Large("Llama", ONE, {}),
    "our GPT, stage 3": Large("our GPT", ONE, {}),
    "Flax GPT, stage 3": Large("Flax GPT", ONE, {}),
    "Flax GPT, stage 1": Large("Flax GPT", ONE, {"stage": 1}),
    "gather keep": Large("Llama", ONE, {"gather": "keep"}),
    "gather once per step": Large("Llama", ONE, {"gather": "once_per_step"}),
    "no prefetch": Large("Llama", ONE, {"prefetch_bytes": 0}),
    "tiles": Large("Llama", ONE, {"tile_bytes": 2**24}),
    "2 microbatches": Large("Llama", ONE, {"accumulate": 2}),
    "2 microbatches, reduced once": Large("Llama", ONE, {"accumulate": 2, "reduce": "once"}),
    "4 microbatches, stage 2": Large("our GPT", ONE, {"accumulate": 4, "stage": 2}),
    "two axes": Large("Llama", TWO, {}),
    "param_axes": Large("Llama", TWO, {"param_axes": "local"}),
    "hybrid": Large("Llama", TWO, {"param_axes": "local", "optimizer_axes": "local"}),
    "reduced in codes": Large("Llama", ONE, {"reduce_dtype": jnp.int8}),
    "gathered in codes": Large("Llama", ONE, {"gather_dtype": jnp.int8}),
    "activations in pinned memory": Large("Llama", ONE, {"offload_activations": PINNED}),
}  # fmt: skip
H200 = [*LARGE]
LARGE |= {
    "5 devices, which divide nothing": Large("Llama", {"data": 5}, {}),
    "5 devices, stage 1": Large("Llama", {"data": 5}, {"stage": 1}),
    "layers unrolled": Large("DiT", ONE, {}),
    "layers unrolled, some prefetch": Large("DiT", ONE, {"prefetch_bytes": 2**26}),
}


def traced(name: str) -> Record:
    """What jzero says of the step, and the program that it makes."""
    row = LARGE[name]
    with jax.enable_x64(False):
        step, state, batch = sharded(name)
        found = {"row": [_title(row)], **described(step.describe(state, batch))}
        return found | {"program": events(jax.make_jaxpr(step)(state, batch))}


def compiled(name: str) -> Record:
    """What the compiled program holds, moves and, as `jzero.preflight` models it, waits for."""
    row = LARGE[name]
    step, state, batch = _sharded(row, jzero.target_mesh(**TOPOLOGY, axes=row.axes))
    program = measure.Kept(step.lower(state, batch), {})
    numbers = measure.numbers(jzero.preflight(program, **TOPOLOGY, compiler_options={}))
    versions = records.versions("jax", "jaxlib")
    return {
        "row": [_title(row), f"H200s; JAX {versions['jax']}, jaxlib {versions['jaxlib']}"],
        "compiled": [
            f"peak: {numbers['peak_bytes']:,} bytes",
            f"arguments: {numbers['argument_bytes']:,} bytes",
            *(f"bytes by {op}: {num:,}" for op, num in numbers["moved_bytes"].items()),
            *(f"{op}: {num:,}" for op, num in numbers["times"].items()),
            f"modelled, exposed: {numbers['exposed_seconds'] * 1e6:,.0f} us",
            f"modelled, step: {numbers['step_seconds'] * 1e6:,.0f} us",
        ],
    }


def sharded(name: str) -> tuple[Any, Any, Any]:
    """A row's step on devices of this machine, and shapes of its state and batch."""
    return _sharded(LARGE[name], small.mesh(**LARGE[name].axes))


def _sharded(row: Large, mesh: jax.sharding.Mesh) -> tuple[Any, Any, Any]:
    """The step, and shapes of its state and batch."""
    model = zoo.ROWS[row.model].small or zoo.ROWS[row.model].model
    step = jzero.shard_train_step(model.step, mesh=mesh, **grouped(**row.options))
    state = jax.eval_shape(model.init, jax.random.key(0))
    return step, state, model.batch(mesh.size * row.options.get("accumulate", 1))


def _title(row: Large) -> str:
    axes = " x ".join(f"{axis} {size}" for axis, size in row.axes.items())
    return f"{row.model} on {axes}; {options_text(row.options)}"
