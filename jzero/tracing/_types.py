# SPDX-License-Identifier: Apache-2.0
"""Protocols of the parts of JAX's jaxprs that jzero reads, on all releases (test_jaxpr_types.py).

JAX's own classes move between releases, and type an aval as any abstract value.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeAlias, runtime_checkable

import numpy as np


@runtime_checkable
class Aval(Protocol):
    """The type of an array; almost all values are arrays."""

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
    @property
    def aval(self) -> Aval: ...
    def __hash__(self) -> int: ...


@runtime_checkable
class Literal(Protocol):
    """A constant in an equation. Unlike a variable, it has no hash."""

    __hash__: ClassVar[None]  # type: ignore[assignment]

    @property
    def aval(self) -> Aval: ...
    @property
    def val(self) -> Any: ...


Atom: TypeAlias = Var | Literal


@runtime_checkable
class Primitive(Protocol):
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
    """JAX's jaxprs, and jzero's own (`_rewrite.Flat`)."""

    @property
    def constvars(self) -> list[Var]: ...
    @property
    def invars(self) -> list[Var]: ...
    @property
    def outvars(self) -> list[Atom]: ...
    @property
    def eqns(self) -> list[Eqn]: ...
