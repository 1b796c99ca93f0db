# SPDX-License-Identifier: Apache-2.0
"""`LikeArray`: a leaf at rest that whoever computes with it takes for a plain array of its true shape."""

from __future__ import annotations

import copy
import math
from typing import Any

import jax

from jzero.tracing import _jaxpr
from jzero.tracing._axis_types import takes_explicit_axes


class LikeArray(jax.Array):
    """A `jax.Array` that has its values elsewhere, or in another shape, until somebody computes with it.

    A subclass says its `shape`, `dtype` and `sharding`, which are those of the plain array, and makes that
    array in `__jax_array__`. All that this class does not answer itself is asked of a plain array: operators
    (`x + 1`), methods (`x.sum()`), `x.at`. JAX makes one of every such argument of a transformed function.
    Each use makes it anew, and nothing keeps it: a program that donates its arguments consumes it, not `x`.
    """

    __array_priority__ = 100  # As of JAX's own arrays: NumPy's leave operators to it.
    # `_committed`, of which JAX asks too, would make `jax.device_put` return `x` itself.
    committed = True
    weak_type = False

    def __init_subclass__(cls) -> None:
        cls.__jax_array__ = takes_explicit_axes(cls.__jax_array__)  # type: ignore[method-assign]
        _jaxpr.register_array(cls, cls.__jax_array__)

    def __jax_array__(self) -> jax.Array:
        """The leaf as a plain array of this shape and sharding."""
        raise NotImplementedError

    @property
    def aval(self) -> Any:
        """Its type, as JAX says it."""
        return jax.typeof(self)

    @property
    def ndim(self) -> int:
        """How many dims there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements, without padding."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf, without padding."""
        return self.size * self.itemsize

    @property
    def device(self) -> Any:
        """Its sharding, as of all arrays that lie on several devices."""
        return self.sharding

    def devices(self) -> set[jax.Device]:
        """The devices that it is for."""
        return self.sharding.device_set

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all devices that it is for are this process's."""
        return self.sharding.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        """Whether the plain array is whole on every device."""
        return self.sharding.is_fully_replicated

    def __len__(self) -> int:
        return self.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        """What to call with which arguments for a copy; pickle asks, too."""
        raise NotImplementedError

    def __copy__(self) -> Any:
        return self.__deepcopy__({})  # Of arrays, too, it has memory of its own.

    def __deepcopy__(self, memo: Any) -> Any:
        make, args = self.__reduce__()
        return make(*copy.deepcopy(args, memo))


def _asked(name: str) -> Any:
    """A method that a plain array answers."""

    def ask(self: LikeArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.__jax_array__(), name)(*args, **kwargs)

    ask.__name__, ask.__doc__ = name, f"`{name}` of the plain array."
    return ask


def _read(name: str) -> property:
    """A property that a plain array answers."""
    return property(
        lambda self: getattr(self.__jax_array__(), name), doc=f"`{name}` of the plain array."
    )


# What arrays have that their base class does not name.
_MORE = (
    "__bool__", "__complex__", "__dlpack__", "__dlpack_device__", "__float__", "__index__", "__int__",
    "__iter__", "clone", "tobytes", "tolist",
)  # fmt: skip
for _name in _MORE:
    setattr(LikeArray, _name, _asked(_name))
for _name, _value in vars(jax.Array).items():
    if _name not in vars(LikeArray) and _name != "__numpy_dtype__":
        if isinstance(_value, property):
            setattr(LikeArray, _name, _read(_name))
        elif callable(_value):
            setattr(LikeArray, _name, _asked(_name))
