"""Twenty rows that are compiled for H200s: what XLA makes of the programs that jzero writes.

Models of experiments/rivals, as their authors write them, with half a billion parameters on the eight
devices of a host. Nothing runs. What was compiled is kept in .cache/rivals, so that only programs that changed
are compiled again.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jzero
from experiments.rivals import measure, zoo
from experiments.shared import records

from ._record import Record

TOPOLOGY = {"target": "h200", "topology": "1x8"}
ONE, TWO = {"data": 8}, {"node": 2, "local": 4}
PINNED = jzero.PinnedHost(device_bytes=2**30)


class Compiled(NamedTuple):
    """A model of experiments/rivals, the sizes of the mesh's axes by name, and options."""

    model: str
    axes: Mapping[str, int]
    options: Mapping[str, Any]


H200_ROWS = {
    "Llama, stage 0": Compiled("Llama", ONE, {"stage": 0}),
    "Llama, stage 1": Compiled("Llama", ONE, {"stage": 1}),
    "Llama, stage 2": Compiled("Llama", ONE, {"stage": 2}),
    "Llama, stage 3": Compiled("Llama", ONE, {}),
    "our GPT, stage 3": Compiled("our GPT", ONE, {}),
    "Flax GPT, stage 3": Compiled("Flax GPT", ONE, {}),
    "Flax GPT, stage 1": Compiled("Flax GPT", ONE, {"stage": 1}),
    "gather keep": Compiled("Llama", ONE, {"gather": "keep"}),
    "gather once per step": Compiled("Llama", ONE, {"gather": "once_per_step"}),
    "no prefetch": Compiled("Llama", ONE, {"prefetch_bytes": 0}),
    "tiles": Compiled("Llama", ONE, {"tile_bytes": 2**24}),
    "2 microbatches": Compiled("Llama", ONE, {"accumulate": 2}),
    "2 microbatches, reduced once": Compiled("Llama", ONE, {"accumulate": 2, "reduce": "once"}),
    "4 microbatches, stage 2": Compiled("our GPT", ONE, {"accumulate": 4, "stage": 2}),
    "two axes": Compiled("Llama", TWO, {}),
    "param_axes": Compiled("Llama", TWO, {"param_axes": "local"}),
    "hybrid": Compiled("Llama", TWO, {"param_axes": "local", "optimizer_axes": "local"}),
    "reduced in codes": Compiled("Llama", ONE, {"reduce_dtype": jnp.int8}),
    "gathered in codes": Compiled("Llama", ONE, {"gather_dtype": jnp.int8}),
    "activations in pinned memory": Compiled("Llama", ONE, {"offload_activations": PINNED}),
}  # fmt: skip


def compiled(name: str) -> Record:
    """What the compiled program holds, moves and, as `jzero.preflight` models it, waits for."""
    row = H200_ROWS[name]
    mesh = jzero.target_mesh(**TOPOLOGY, axes=row.axes)
    model = zoo.ROWS[row.model].small
    step = jzero.shard_train_step(model.step, mesh=mesh, **row.options)
    state = jax.eval_shape(model.init, jax.random.key(0))
    batch = model.batch(mesh.size * row.options.get("accumulate", 1))
    program = measure.Kept(step.lower(state, batch), {})
    found = jzero.preflight(program, **TOPOLOGY, compiler_options={})
    numbers = measure.numbers(found)
    axes = " x ".join(f"{axis} {size}" for axis, size in row.axes.items())
    options = ", ".join(
        f"{name}={getattr(value, '__name__', None) or repr(value)}"
        for name, value in sorted(row.options.items())
    )
    versions = records.versions("jax", "jaxlib")
    return {
        "row": [
            f"{row.model} on {axes} of H200s; {options or 'defaults'}",
            f"JAX {versions['jax']}, jaxlib {versions['jaxlib']}",
        ],
        "compiled": [
            f"peak: {numbers['peak_bytes']:,} bytes",
            f"arguments: {numbers['argument_bytes']:,} bytes",
            *(f"bytes by {op}: {num:,}" for op, num in numbers["moved_bytes"].items()),
            *(f"{op}: {num:,}" for op, num in numbers["times"].items()),
            f"modelled, exposed: {numbers['exposed_seconds'] * 1e6:,.0f} us",
            f"modelled, step: {numbers['step_seconds'] * 1e6:,.0f} us",
        ],
    }
