"""Weights at rest in codes, for GPUs: what a program takes, gathers, and decodes at a time."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import gpu_compiler
import jzero

gpu_compiler.skip_without_it()

WIDTH, ROWS = 2048, 64
BLOCKS = {"int8": jzero.Blocks("int8"), "int4": jzero.Blocks("int4")}


def scanned(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    return lax.scan(layer, x, params)[0]


def unrolled(params, x):
    for i in range(params["up"].shape[0]):
        x = x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]
    return x


def decoded(fn):
    """Eight tokens, each through all layers."""
    return lambda params, x: lax.fori_loop(0, 8, lambda _, x: jnp.tanh(fn(params, x)), x)


@functools.cache
def compiled(fn, codes, num_layers, gather=None):
    mesh = jzero.target_mesh("h200", "1x8")
    eval_step: Any = jzero.shard_eval_step(
        fn, mesh=mesh, weight_dtype=BLOCKS.get(codes), comm=jzero.Comm(gather=gather)
    )
    shapes = {"up": (num_layers, WIDTH, 2 * WIDTH), "down": (num_layers, 2 * WIDTH, WIDTH)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return eval_step.lower(params, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)).compile()


DECODE = decoded(scanned)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "codes", "layers"),
    [(scanned, "int8", (4, 12)), (unrolled, "int4", (12, 20)), (DECODE, "int4", (4, 12))],
    ids=["scanned", "unrolled", "decoding"],
)
def test_a_program_takes_codes_and_gathers_codes(fn, codes, layers):
    gather = "per_pass" if fn is DECODE else None
    few, many = (compiled(fn, codes, num, gather) for num in layers)
    matrix = WIDTH * 2 * WIDTH
    row = BLOCKS[codes].nbytes(matrix // 8)
    arguments = many.memory_analysis().argument_size_in_bytes
    assert 0 <= arguments - layers[1] * 2 * row < 2**20
    # Depth costs its codes, and no weights that are decoded, or gathered, long before their turn.
    more = many.memory_analysis().temp_size_in_bytes - few.memory_analysis().temp_size_in_bytes
    assert more < 2 * matrix
    gathers = [line for line in many.as_text().splitlines() if "all-gather-start(" in line]
    assert gathers
    assert all("u8[" in line and "bf16[" not in line for line in gathers)
