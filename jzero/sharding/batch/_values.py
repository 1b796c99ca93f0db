# SPDX-License-Identifier: Apache-2.0
"""Values of the whole-batch step, and the forms in which a device has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from jzero.ir import _rules
from jzero.sharding.batch._rows import FULL, Form, Rows, local_shape
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Aval, Literal, Var


class OfSum(NamedTuple):
    """Of a whole value that is made of a sum over the devices.

    Attributes:
      rows: writes rows of it, for which the sum is scattered; None where they cannot be.
      is_gradient: whether it is a backward pass's sum.
    """

    rows: Callable[[Rows], Atom | None]
    is_gradient: bool


@dataclasses.dataclass(eq=False)
class BatchValue:
    """A value of the whole-batch step, and the forms in which this device has it.

    Attributes:
      aval: type of the whole.
      form: what it is; FULL also of what nobody has asked for yet.
      atoms: the variables that hold it, by form.
      make: writes the equation that makes it in a form; of values that are made where they are needed (an
        iota, a broadcast, random bits), so that a device makes its own rows only.
      of_sum: of a whole value that is made of a sum over the devices, how rows of it are.
      is_queue: whether its rows are those of a scattered sum, and not of the batch.
      grown_from: of rows that are made of smaller ones, which can move in their place: bytes of those.
      asked: of a body's inputs, forms that it asked for and was not given, and why.
      fill: the number that all its elements are, if that is known.
      constant: evaluates it, if it depends on nothing but constants.
      columns: of an array of indices, which values stand along its last dim.
    """

    aval: Aval
    form: Form
    atoms: dict[Form, Atom]
    make: Callable[[BatchValue, Form], Atom] | None = None
    of_sum: OfSum | None = None
    is_queue: bool = False
    grown_from: int = 0
    asked: dict[Form, str] | None = None
    fill: ArrayLike | None = None
    constant: Callable[[], np.ndarray] | None = None
    columns: dict[int, BatchValue] | None = None

    @property
    def is_lazy(self) -> bool:
        """Whether it is made where it is needed."""
        return self.form is FULL and FULL not in self.atoms

    @property
    def cheapest_bytes(self) -> int:
        """Bytes of the whole, or of what it can be made of."""
        return self.grown_from or self.nbytes

    @property
    def rows(self) -> list[Rows]:
        """The rows that are there, its form first; none of a whole value, of which any can be made."""
        if not isinstance(self.form, Rows):
            return []
        return [self.form, *(f for f in self.atoms if isinstance(f, Rows) and f != self.form)]

    @property
    def at_hand(self) -> Form:
        """The form in which it is there already."""
        if self.is_lazy and self.atoms:
            return next(iter(self.atoms))
        return self.form

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return _rules.size_in_bytes(self.aval)


def var_in(aval: Aval, form: Form) -> Var:
    """A new variable for what a device has of a value in this form."""
    return _jaxpr.var_like(aval, local_shape(aval.shape, form) if isinstance(form, Rows) else None)


def vars_in(variables: Iterable[Var], forms: Iterable[Form]) -> list[Var]:
    """A new variable in its form for each of some."""
    return [var_in(var.aval, form) for var, form in zip(variables, forms, strict=True)]


def values_of(
    variables: Iterable[Var], forms: Iterable[Form], atoms: Iterable[Atom], is_queue: bool = False
) -> list[BatchValue]:
    """Values of which these atoms are there, each in its form."""
    return [
        BatchValue(var.aval, form, {form: atom}, is_queue=is_queue)
        for var, form, atom in zip(variables, forms, atoms, strict=True)
    ]


def whole(atom: Atom) -> BatchValue:
    """A value that is there whole."""
    return BatchValue(atom.aval, FULL, {FULL: atom})


def rows_of(aval: Aval, rows: Rows, atom: Atom) -> BatchValue:
    """A value of which this device's rows are there."""
    return BatchValue(aval, rows, {rows: atom})


def literal(atom: Literal) -> BatchValue:
    """The value of a literal, of which all is known."""
    value = whole(atom)
    value.fill = atom.val if np.ndim(atom.val) == 0 else None
    value.constant = lambda: np.asarray(atom.val, atom.aval.dtype)
    return value
