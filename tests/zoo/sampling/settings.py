"""How programs are sharded: meshes, stages and options, drawn from a seed."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jzero
from jzero.sharding.passes import _quantize
from jzero.sharding.plan import _quantized_leaves

from .._setting import Setting

MESHES = {
    (8,): 6, (4,): 4, (2,): 3, (1,): 1, (3,): 1, (5,): 1, (6,): 1, (7,): 1, (2, 4): 3, (4, 2): 1, (2, 2): 1,
    (3, 2): 1,
}  # fmt: skip
STAGES = {3: 8, 2: 4, 1: 4, 0: 2}
ROWS = {8: 5, 16: 5, 12: 3, 24: 1, 4: 1, 10: 2, 7: 1, 13: 2}
ACCUMULATE = {1: 20, 2: 3, 3: 1, 4: 2}
OFFLOAD: dict[Any, int] = {
    jzero.NoOffload(): 24, jzero.PinnedHost(): 1, jzero.PinnedHost(device_bytes=4096): 1,
    jzero.HostCPU(threads=1): 2, jzero.HostCPU(threads=1, ratio=0.5): 1,
}  # fmt: skip


def draw(seed: int) -> Setting:
    """A random setting; the same seed gives the same one."""
    rng = np.random.default_rng([seed, 1])

    def choose(options: Any) -> Any:
        names = list(options)
        weights = np.array([options[name] if isinstance(options, dict) else 1 for name in names])
        return names[rng.choice(len(names), p=weights / weights.sum())]

    axes, stage, rows = choose(MESHES), choose(STAGES), choose(ROWS)
    options: dict[str, Any] = {"min_shard_bytes": choose((0, 0, 0, 100))}
    accumulate, offload = choose(ACCUMULATE), choose(OFFLOAD)
    dtype = choose({"float64": 6, "float32": 1})
    if rng.random() < 0.15:
        options["reduce_dtype"] = dtype
    if accumulate > 1 and rng.random() < 0.7:  # else outputs with rows are refused
        rows = int(np.prod(axes)) * accumulate * choose((1, 2))
    if stage > 0 and not isinstance(offload, jzero.NoOffload):
        options["offload"] = offload
    if stage == 3:
        more: dict[str, Any] = {
            "prefetch_bytes": choose((0, 200, 2000)), "reduce": choose(("once", "each")),
            "gather": choose(("keep", "once_per_step")), "full": choose(("w[01]", "w[0-2]")),
        }  # fmt: skip
        options |= {name: value for name, value in more.items() if rng.random() < 0.3}
    if stage > 0 and len(axes) == 2 and rng.random() < 0.6:
        options["optimizer_axes"] = choose(("a", "b"))
        if stage == 3:
            options["param_axes"] = options["optimizer_axes"]
    elif stage == 3 and len(axes) == 2 and rng.random() < 0.5:
        options["param_axes"] = choose(("a", "b"))
    if stage > 0 and rng.random() < 0.2:
        some = choose(Setting(axes=axes).names)
        codes: dict[str, Any] = {"reduce_dtype": choose(("int8", {some: "int4"}))}
        if stage == 3:  # else for leaves with masters
            codes["gather_dtype"] = "int8"
        options |= {name: value for name, value in codes.items() if rng.random() < 0.7}
    return Setting(stage, axes, dtype, accumulate, options, rows)


@contextlib.contextmanager
def codes_that_round_nothing() -> Iterator[None]:
    """Rows on the wire are the bytes of floats, of leaves of any size.

    What travels as codes is then what one device has, to rounding of sums; all but the numbers themselves is
    the library's: which leaves, hops, parts, what is padded, what waits as a row.
    """

    def encode(x: jax.Array, blocks: Any) -> jax.Array:
        wide = x.astype(_quantize._wide(x.dtype))
        return lax.bitcast_convert_type(wide, jnp.uint8).reshape(x.shape[0], -1)

    def decode(row: jax.Array, n: int, dtype: Any, blocks: Any) -> jax.Array:
        wide = jnp.dtype(_quantize._wide(dtype))
        parts = row.reshape(row.shape[0], n, wide.itemsize)
        return lax.bitcast_convert_type(parts, wide).astype(dtype)

    with (
        mock.patch.multiple(_quantize, quantize=encode, dequantize=decode),
        mock.patch.object(_quantized_leaves, "LEAST", 0),
    ):
        yield
