"""How a step is called: its arguments bound to names, the state and static ones told from the others."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from jzero._errors import OptionError, StepError, message
from jzero.tracing._call import WHO

_REST = inspect.Parameter.VAR_POSITIONAL


class Call(NamedTuple):
    """One call, taken apart: the state, the other array arguments by name, and what is static."""

    state: Any
    arrays: dict[str, Any]
    static: tuple[tuple[str, Hashable], ...]

    @property
    def static_key(self) -> tuple[tuple[str, type, Hashable], ...]:
        """What is static, with types: 1, True and 1.0 are equal, and may be other steps."""
        return tuple([(name, type(value), value) for name, value in self.static])


# Where among the values of a call are the state, the other arrays by name, and the static ones by name.
_Binding = tuple[int | None, list[tuple[str, int]], list[tuple[str, int]]]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of `step_fn`; the first one is the state.

    Attributes:
      parameters: `inspect`'s signature of the step.
      state_name: name of the state's parameter.
      static_names: parameters whose values are compiled into the step.
      specs: PartitionSpec (or tree prefix of them) by parameter name.
    """

    parameters: inspect.Signature
    state_name: str
    static_names: frozenset[str]
    specs: Mapping[str, Any]
    # By how many arguments are given by position, and which by name: `inspect` is slow, and every step asks.
    _bindings: dict[tuple[Any, ...], _Binding] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(
        cls, step_fn: Callable[..., Any], static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str], in_specs: Mapping[str | int, Any] | None,
    ) -> Signature:  # fmt: skip
        """Reads the signature and resolves positions and names; unknown ones are errors."""
        try:
            signature = inspect.signature(step_fn)
        except ValueError:  # A callable written in C.
            signature = inspect.Signature(
                [
                    inspect.Parameter("state", inspect.Parameter.POSITIONAL_ONLY),
                    inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
                ]
            )
        names = list(signature.parameters)
        if not names:
            raise StepError(message(
                WHO, "step_fn takes no arguments", "Its first argument is the state.",
                "Write step_fn(state, batch)."))  # fmt: skip
        numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
        strings = (static_argnames,) if isinstance(static_argnames, str) else static_argnames
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        rest = kinds.index(_REST) if _REST in kinds else None

        def resolve(option: str, key: str | int) -> str:
            if isinstance(key, int) and rest is not None and key >= rest:
                return f"{names[rest]}[{key - rest}]"
            if isinstance(key, int) and -len(names) <= key < len(names):
                return names[key]
            if isinstance(key, str) and (key in names or inspect.Parameter.VAR_KEYWORD in kinds):
                return key
            raise OptionError(message(
                WHO, f"{option} names {key!r}, and step_fn's parameters are {names}",
                f"{option} takes parameter names or positions.", "Correct or drop it."))  # fmt: skip

        static = frozenset(
            [resolve("static_argnums", n) for n in numbers]
            + [resolve("static_argnames", n) for n in strings]
        )
        if names[0] in static:
            raise OptionError(message(
                WHO, f"the state {names[0]!r} is declared static",
                "The state holds the arrays that are trained.", "Drop it from static_argnums."))  # fmt: skip
        specs = {resolve("in_specs", key): spec for key, spec in (in_specs or {}).items()}
        if names[0] in specs:
            raise OptionError(message(
                WHO, f"in_specs names the state {names[0]!r}",
                "The stage decides how the state lies.", "Drop it from in_specs."))  # fmt: skip
        return cls(signature, names[0], static, specs)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes one call apart; positional and keyword spellings of it give the same `Call`."""
        form = len(args), *kwargs
        if form not in self._bindings:
            self._bindings[form] = self._binding(len(args), list(kwargs))
        state, arrays, static = self._bindings[form]
        given = [*args, *kwargs.values()]
        return Call(
            None if state is None else given[state],
            {name: given[i] for name, i in arrays},
            tuple([(name, _hashable(name, given[i])) for name, i in static]),
        )

    def _binding(self, num_args: int, keywords: Sequence[str]) -> _Binding:
        """How calls with so many arguments by position, and these by name, are bound."""
        numbers = {name: num_args + i for i, name in enumerate(keywords)}
        found = _flat_arguments(self.parameters.bind(*range(num_args), **numbers))
        state = found.pop(self.state_name, None)
        static = [(name, i) for name, i in found.items() if name in self.static_names]
        arrays = [(name, i) for name, i in found.items() if name not in self.static_names]
        return state, sorted(arrays), static  # as JAX sorts dicts

    def call(
        self, step_fn: Callable[..., Any], state: Any, arrays: Mapping[str, Any],
        static: Sequence[tuple[str, Any]],
    ) -> Any:  # fmt: skip
        """Calls the step as the user would have."""
        values = {self.state_name: state, **arrays, **dict(static)}
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        skipped = False
        for name, parameter in self.parameters.parameters.items():
            if parameter.kind == parameter.VAR_POSITIONAL:
                args += [v for key, v in sorted(
                    ((int(k[len(name) + 1 : -1]), v) for k, v in values.items()
                     if k.startswith(f"{name}[")), key=lambda kv: kv[0])]  # fmt: skip
            elif parameter.kind == parameter.VAR_KEYWORD:
                known = self.parameters.parameters.keys() - {name}  # It may name one of its own.
                kwargs |= {k: v for k, v in values.items() if k not in known and "[" not in k}
            elif name not in values:
                skipped = True  # Its default applies; what follows goes by name.
            elif skipped or parameter.kind == parameter.KEYWORD_ONLY:
                kwargs[name] = values[name]
            else:
                args.append(values[name])
        return step_fn(*args, **kwargs)


def _flat_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind == inspect.Parameter.VAR_POSITIONAL:
            flat |= {f"{name}[{i}]": item for i, item in enumerate(value)}
        elif kind == inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return flat


def _hashable(name: str, value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise OptionError(message(
            WHO, f"static argument {name!r} is a {type(value).__name__}, which cannot be hashed",
            "Static arguments are compiled into the step and looked up by their hash.",
            "Pass a tuple or a frozen dataclass instead, or drop it from static_argnames.",
        )) from None  # fmt: skip
    return value
