# SPDX-License-Identifier: Apache-2.0
"""What jzero reads of JAX's jaxprs, as every release of JAX has it (test_jaxpr_types.py).

JAX's own classes move between releases, and say of an aval that it is any abstract value.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np


@runtime_checkable
class Aval(Protocol):
    """The type of a value: an array, as nearly all of them are."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def weak_type(self) -> bool: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...


@runtime_checkable
class Var(Protocol):
    """A variable: it is itself and no other, whatever it is called when printed."""

    @property
    def aval(self) -> Aval: ...
    def __hash__(self) -> int: ...


@runtime_checkable
class Literal(Protocol):
    """A constant that is written into an equation."""

    # What tells it from a variable.
    __hash__: ClassVar[None]  # type: ignore[assignment]

    @property
    def aval(self) -> Aval: ...
    @property
    def val(self) -> Any: ...


Atom: TypeAlias = Var | Literal


@runtime_checkable
class Primitive(Protocol):
    """What an equation does."""

    @property
    def name(self) -> str: ...
    @property
    def multiple_results(self) -> bool: ...
    def bind(self, *args: Any, **params: Any) -> Any: ...
    def impl(self, *args: Any, **params: Any) -> Any: ...
    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]: ...


@runtime_checkable
class Eqn(Protocol):
    """`outvars = primitive[params](invars)`."""

    @property
    def primitive(self) -> Primitive: ...
    @property
    def invars(self) -> list[Atom]: ...
    @property
    def outvars(self) -> list[Var]: ...
    @property
    def params(self) -> dict[str, Any]: ...
    @property
    def effects(self) -> Any: ...
    @property
    def source_info(self) -> Any: ...
    @property
    def ctx(self) -> Any: ...
    def replace(self, **parts: Any) -> Eqn: ...


@runtime_checkable
class Jaxpr(Protocol):
    """Equations in the order in which they run. JAX's own; jzero's (`_rewrite.Flat`) are read as much."""

    @property
    def constvars(self) -> list[Var]: ...
    @property
    def invars(self) -> list[Var]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def eqns(self) -> list[Eqn]: ...
