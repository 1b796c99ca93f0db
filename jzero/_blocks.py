# SPDX-License-Identifier: Apache-2.0
"""`Blocks`: a quantized format, integers of few bits with one scale for each block."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from jzero._given_fields import GivenFields

# Larger blocks (thousands) double the error; in smaller ones (tens) scales need as many bytes as values.
_SIZES = {"int8": 256, "int4": 128}
_LARGEST = {"int8": 127, "int4": 7}


@dataclasses.dataclass(frozen=True)
class Blocks(GivenFields):
    """A quantized format: integers of 8 or 4 bits, with one scale for each block, to send or store values.

    A block of `size` adjacent elements `x` is quantized to its scale `s` and integers `round(x / s)`; `s =
    max|x| / 127`, or `/ 7` for int4. Each element is dequantized to within half a step `s`. Values that are
    not finite are preserved, and do not affect the elements of their block (whose steps are then 1 % larger,
    of int4 a sixth). A block whose largest element is so small that `s` is no normal number (below 1.5e-36)
    becomes 0, and with `rotate` elements near the dtype's largest number may become Inf. The scale is float32
    (float64 for float64): `size` elements take `size + 4` bytes in int8, `size / 2 + 4` in int4.

    >>> import jax.numpy as jnp, jzero
    >>> jzero.Blocks(jnp.int8)
    Blocks(dtype='int8', size=256, rotate=False, stochastic=False)
    >>> jzero.Blocks(jnp.int4, size=32, rotate=True).nbytes(1024)
    640

    Attributes:
      dtype: `jnp.int8` or `jnp.int4`, or its name.
      size: elements of a block, a power of two from 16 to 65536; 256 for int8 and 128 for int4 by default.
      rotate: whether each block is multiplied by a Hadamard matrix before quantization, and back afterwards,
        which spreads a few large elements over all of them. It helps gradients in 4 bits. Weights become less
        exact, though it harmed a small training less (experiments/wire).
      stochastic: whether values are rounded up or down at random, so that the mean over elements is right.
        The random bits follow from an element's value and position: a resumed run has the same ones, and a
        value that does not change is always rounded alike. Its error is larger: it harmed a small training
        whose weights were gathered so more (experiments/wire).

    Reference:
      Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023,
      sections 3.1 and 3.3. The rotation is that of Tseng et al., "QuIP#", 2024, section 3, without signs.
    """

    dtype: Any
    size: int | None = None
    rotate: bool = False
    stochastic: bool = False

    def __post_init__(self) -> None:
        name = code_name(self.dtype)
        if name is None:
            raise self._refused(
                f"dtype={self.dtype!r}",
                "Quantized values have 8 or 4 bits.",
                "Use jnp.int8 or jnp.int4.",
            )
        object.__setattr__(self, "dtype", name)
        if self.size is None:
            object.__setattr__(self, "size", _SIZES[name])
        edit = f"Use size={_SIZES[name]}, or drop it."
        rule = "It is how many elements have one scale, a power of two from 16 to 65536."
        self._make_int("size", 16, rule, edit, most=2**16)
        if self.elements & (self.elements - 1):
            raise self._refused(f"size={self.size}", rule, edit)
        self._check_bools("rotate", "stochastic")

    @property
    def elements(self) -> int:
        """Elements of a block: `size`."""
        assert self.size is not None
        return self.size

    @property
    def largest(self) -> int:
        """The largest integer: 127 or 7."""
        return _LARGEST[self.dtype]

    @property
    def per_byte(self) -> int:
        """How many elements a byte has: 1 or 2."""
        return 2 if self.dtype == "int4" else 1

    @property
    def bytes_per_element(self) -> Fraction:
        """Bytes of an element, with its share of the scale."""
        return Fraction(1, self.per_byte) + Fraction(4, self.elements)

    def nbytes(self, num: int, scale_bytes: int = 4) -> int:
        """Bytes of `num` elements of one row, with their scales."""
        return -(-num // self.per_byte) + -(-num // self.elements) * scale_bytes

    def __str__(self) -> str:
        more = "".join(f", {name}=True" for name in ("rotate", "stochastic") if getattr(self, name))
        return f"{self.dtype} in blocks of {self.size}{more}"


def code_name(dtype: Any) -> str | None:
    """'int8' or 'int4', if that is what a dtype is, or its name."""
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        return None
    return name if name in _SIZES else None
