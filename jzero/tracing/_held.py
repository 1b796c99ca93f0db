# SPDX-License-Identifier: Apache-2.0
"""Binds the arguments of `from_nnx` and `from_eqx`, which become the state, to a step's parameters."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jzero._errors import StepError, message
from jzero.tracing._signature import MANY, call_by_name, flat_arguments


@dataclasses.dataclass(frozen=True)
class Held:
    """The arguments of a step that are held in a state, and how to call it with the others."""

    names: tuple[str, ...]  # In the order of the step's parameters: 'model', 'args[0]'.
    values: tuple[Any, ...]
    signature: inspect.Signature  # Of the state, and the other parameters in their order.
    _parameters: inspect.Signature

    @classmethod
    def of(
        cls, who: str, train_step: Callable[..., Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Held:  # fmt: skip
        if not args and not kwargs:
            raise StepError(message(
                who, "no argument of train_step was passed", "Those that it changes become the state.",
                f"Write jzero.{who}(train_step, model, optimizer)."))  # fmt: skip
        parameters = _signature(train_step)
        try:
            bound = parameters.bind_partial(*args, **kwargs)
        except TypeError as error:
            raise StepError(message(
                who, f"train_step{parameters} does not accept these arguments ({error})",
                "Arguments are passed in the order of its parameters, or by their names.",
                f"Write jzero.{who}(train_step, model, metrics=metrics).")) from None  # fmt: skip
        held = flat_arguments(bound)
        left = [
            parameter
            for name, parameter in parameters.parameters.items()
            if name not in bound.arguments or parameter.kind in MANY
        ]
        state = "state"
        while state in parameters.parameters or state in held:
            state += "_"
        kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if left and left[0].kind == inspect.Parameter.POSITIONAL_ONLY:
            kind = inspect.Parameter.POSITIONAL_ONLY
        first = inspect.Parameter(state, kind)
        signature = parameters.replace(
            parameters=[first, *left], return_annotation=inspect.Signature.empty
        )
        return cls(tuple(held), tuple(held.values()), signature, parameters)

    def call(
        self, train_step: Callable[..., Any], values: Sequence[Any], args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:  # fmt: skip
        given = self.arguments(args, kwargs) | dict(zip(self.names, values, strict=True))
        return call_by_name(self._parameters, train_step, given)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call beside the state, by name."""
        bound = self.signature.bind(None, *args, **kwargs)
        state, *names = bound.arguments
        held = {name: sum(key.startswith(f"{name}[") for key in self.names) for name in names}
        del bound.arguments[state]
        return flat_arguments(bound, held)


def _signature(train_step: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(train_step)
    except ValueError:  # A callable written in C.
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(n, k) for n, k in kinds.items()])
