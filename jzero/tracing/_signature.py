# SPDX-License-Identifier: Apache-2.0
"""How a step is called: binds arguments to names, and separates state, arrays and static arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jzero._errors import OptionError, StateError, StepError, message
from jzero.tracing import _jax_state, _modules, _objects
from jzero.tracing._call import WHO, checked_specs
from jzero.tracing._returned import as_given
from jzero.tracing._state_arguments import StateArguments, parts

_REST = inspect.Parameter.VAR_POSITIONAL
_OBJECTS, _MODULES = "NNX objects", "Equinox modules"  # Keys among static arguments.
MANY = (_REST, inspect.Parameter.VAR_KEYWORD)


class Call(NamedTuple):
    """One call, taken apart: the state, the other array arguments by name, and static ones.

    A state of several arguments is a `StateArguments`. The state of NNX objects is their `nnx.State`, and
    their graph is static.
    """

    state: Any
    arrays: dict[str, Any]
    static: tuple[tuple[str, Hashable], ...]
    objects: _objects.Objects | None = None

    def given(self, outs: Any) -> Any:
        """The step's results as the user gets them; updates the NNX objects."""
        if self.objects is not None:
            return self.objects.update(outs)
        return as_given(self.result(outs))

    def result(self, outs: Any) -> Any:
        if isinstance(outs, _objects.Mutated):
            return outs.result
        return outs.as_given() if isinstance(outs, _modules.Filtered) else outs

    @property
    def static_key(self) -> tuple[tuple[str, type, Hashable], ...]:
        """Static arguments with their types: 1, True and 1.0 are equal, but may give different programs."""
        return tuple([(name, type(value), value) for name, value in self.static])


# `(name, index among the values of a call)` for the state, other arrays, and static arguments.
_Binding = tuple[list[tuple[str, int]], list[tuple[str, int]], list[tuple[str, int]]]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The parameters of `step_fn`, and which of them are the state."""

    parameters: inspect.Signature
    state_names: tuple[str, ...]
    declared: bool  # The user or the results named the state; else it is the first argument.
    static_names: frozenset[str]
    specs: Mapping[str, Any]  # PartitionSpecs, or tree prefixes of them, by parameter name.
    takes_objects: bool = False  # The state is that of NNX objects.
    filters: bool = False  # `eqx.filter_jit` made the step.
    found: bool = False  # The results showed the state.
    settled: bool = False  # A program was built with the first argument alone as the state.
    name: str = "step_fn"
    # By the number of positional arguments and the keywords: `inspect` is slow, and each step asks.
    _bindings: dict[tuple[Any, ...], _Binding] = dataclasses.field(
        default_factory=dict, compare=False
    )
    # Which values of such a call held NNX objects, and Equinox modules, at the first call.
    _holders: dict[tuple[Any, ...], set[int]] = dataclasses.field(
        default_factory=dict, compare=False
    )
    _with_modules: dict[tuple[Any, ...], set[int]] = dataclasses.field(
        default_factory=dict, compare=False
    )

    @property
    def takes_state_alone(self) -> bool:
        return self.parameters.parameters.keys() <= set(self.state_names)

    @classmethod
    def of(
        cls, step_fn: Callable[..., Any], static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str], in_specs: Mapping[str | int, Any] | None,
        state: str | int | Sequence[str | int] | None = None,
    ) -> Signature:  # fmt: skip
        _objects.check_partial(step_fn, WHO)
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
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        rest = kinds.index(_REST) if _REST in kinds else None

        def resolve(option: str, key: Any) -> str:
            if hasattr(key, "__index__") and not isinstance(key, bool):  # NumPy's, too.
                at = operator.index(key)
                if rest is not None and at >= rest:
                    return f"{names[rest]}[{at - rest}]"
                if -len(names) <= at < len(names):
                    return names[at]
            if isinstance(key, str) and (key in names or inspect.Parameter.VAR_KEYWORD in kinds):
                return key
            raise OptionError(message(
                WHO, f"{option} names {key!r}, and step_fn's parameters are {names}",
                f"{option} takes parameter names or positions.", "Correct or drop it."))  # fmt: skip

        def chosen(option: str, given: Any) -> set[str]:
            keys = given if isinstance(given, list | tuple) else [given]
            if isinstance(given, set | frozenset | range):
                keys = sorted(given)
            return {resolve(option, key) for key in keys}

        declared = state is not None
        static = frozenset(
            name
            for numbers, strings in (
                (static_argnums, static_argnames),
                _jax_state.static_arguments(step_fn),
            )
            for name in chosen("static_argnums", numbers) | chosen("static_argnames", strings)
        )
        # The state is the first argument that is not static (like `self`), nor bound by `functools.partial`.
        bound = {
            p.name
            for p in signature.parameters.values()
            if p.kind == p.KEYWORD_ONLY and p.default is not p.empty
        }
        first = next((i for i, name in enumerate(names) if name not in static | bound), 0)
        found = chosen("state", state if declared else first)
        if not found:
            raise OptionError(message(
                WHO, f"state={state!r} names no argument",
                "The state holds the arrays that are trained.",
                "Name its arguments: state=('params', 'opt_state')."))  # fmt: skip
        state_names = _in_order(signature, found)
        if found & static:
            raise OptionError(message(
                WHO, f"the state {_quoted(state_names, static)} is declared static",
                "The state holds the arrays that are trained.", "Drop it from static_argnums."))  # fmt: skip
        given_specs = checked_specs(in_specs)
        specs = {resolve("in_specs", key): spec for key, spec in given_specs.items()}
        if len(specs) < len(given_specs):
            raise OptionError(message(
                WHO, f"in_specs names an argument twice: {', '.join(map(repr, given_specs))}",
                "It takes one spec for each argument.", "Name it once, or by its position."))  # fmt: skip
        if found & specs.keys():
            raise OptionError(message(
                WHO, f"in_specs names the state {_quoted(state_names, specs)}",
                "The stage decides the layout of the state.", "Drop it from in_specs."))  # fmt: skip
        filters = _modules.is_filtered(step_fn)
        return cls(
            signature, state_names, declared, static, specs, filters=filters, name=_name_of(step_fn)
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """Takes a call apart; its positional and keyword spellings give the same `Call`."""
        form = len(args), *kwargs
        if form not in self._bindings:
            self._bindings[form] = self._binding(len(args), list(kwargs))
        state, arrays, static = self._bindings[form]
        given = [*args, *kwargs.values()]
        compiled = tuple([(name, _hashable(name, given[i])) for name, i in static])
        held = self._objects(form, given, [*state, *arrays]) if _objects.kinds() else {}
        if held:
            beside = {name: given[i] for name, i in sorted([*state, *arrays]) if name not in held}
            objects = _objects.Objects.of(WHO, held)
            return Call(objects.state, beside, (*compiled, (_OBJECTS, objects.graph)), objects)
        if "equinox" in sys.modules:
            rest, given = self._apart(form, given, [*state, *arrays])
            compiled = (*compiled, (_MODULES, rest)) if rest else compiled
        return Call(self._state(state, given), {name: given[i] for name, i in arrays}, compiled)

    def _objects(
        self, form: tuple[Any, ...], given: Sequence[Any], numbers: Sequence[tuple[str, int]]
    ) -> dict[str, Any]:
        """The arguments of a call that hold NNX objects, in the order of the parameters.

        Containers are searched at the first call only, because each node takes time. Objects that one holds
        later are treated as pytrees, as if `state=` were given.
        """
        state = next((given[i] for name, i in numbers if name in self.state_names), None)
        if self.declared or _objects.is_state(state):
            return {}
        if form not in self._holders:
            self._holders[form] = {i for _, i in numbers if _objects.holds_objects(given[i])}
        holders, kinds = self._holders[form], _objects.kinds()
        found = {
            name: given[i]
            for name, i in numbers
            if isinstance(given[i], kinds) or (i in holders and _objects.holds_objects(given[i]))
        }
        bad = [name for name in self.in_order(found) if name in self.specs]
        if bad:
            raise OptionError(message(
                WHO, f"in_specs names {', '.join(bad)}, of NNX objects",
                "The stage decides the layout of the state.", "Drop it from in_specs."))  # fmt: skip
        return {name: found[name] for name in self.in_order(found)}

    def _apart(
        self, form: tuple[Any, ...], given: list[Any], numbers: Sequence[tuple[str, int]]
    ) -> tuple[tuple[tuple[str, _modules.Static], ...], list[Any]]:
        """The non-arrays of a call with Equinox modules by argument, and the values without them."""
        if form not in self._with_modules:
            found = {i for _, i in numbers if _modules.holds_modules(given[i])}
            self._with_modules[form] = found
        modules, rest, arrays = self._with_modules[form], [], list(given)
        if modules or self.filters:
            for name, i in numbers:
                are_arrays = not self.filters and i not in modules
                arrays[i], static = _modules.apart(given[i], are_arrays)
                rest += [(name, static)] if static else []
        return tuple(rest), arrays

    def _binding(self, num_args: int, keywords: Sequence[str]) -> _Binding:
        numbers = {name: num_args + i for i, name in enumerate(keywords)}
        try:
            bound = self.parameters.bind(*range(num_args), **numbers)
        except TypeError as error:
            raise self._refused(keywords, error) from None
        found = flat_arguments(bound)
        state = [(name, found.pop(name)) for name in self.state_names if name in found]
        static = [(name, i) for name, i in found.items() if name in self.static_names]
        arrays = [(name, i) for name, i in found.items() if name not in self.static_names]
        return state, sorted(arrays), static  # as JAX sorts dicts

    def _refused(self, keywords: Sequence[str], error: TypeError) -> StepError:
        parameters = list(self.parameters.parameters.values())
        bare = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
        takes_any = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
        unknown = [k for k in keywords if k not in self.parameters.parameters and not takes_any]
        extra = f", and there is no parameter {', '.join(map(repr, unknown))}" if unknown else ""
        needed = [p for p in parameters if p.default is p.empty and p.kind not in MANY]
        call = [f"{p.name}={p.name}" if p.kind == p.KEYWORD_ONLY else p.name for p in needed]
        return StepError(message(
            WHO, f"a call does not fit {self.name}{bare}: {error}{extra}",
            "A sharded step is called like its function.",
            f"Call it with ({', '.join(call)})."))  # fmt: skip

    def _state(self, numbers: Sequence[tuple[str, int]], given: Sequence[Any]) -> Any:
        if len(self.state_names) == 1 and numbers:
            return given[numbers[0][1]]
        names, values = tuple([name for name, _ in numbers]), [given[i] for _, i in numbers]
        return StateArguments(names, tuple(values))

    def is_state(self, state: Any) -> bool:
        """Whether it may be the state: the tuple of its arguments, if these are several."""
        num = len(self.state_names)
        return num == 1 or (isinstance(state, tuple | list) and len(state) == num)

    def named(self, state: Any, who: str) -> Any:
        """The user's state; if it has several arguments, their tuple becomes a `StateArguments`."""
        if len(self.state_names) == 1:
            return state
        if not self.is_state(state):
            tuples = f" of {len(state)}" if isinstance(state, tuple | list) else ""
            raise StateError(message(
                who, f"the state is a {type(state).__name__}{tuples}",
                "The state of a step that has it in several arguments is the tuple of these.",
                f"Pass ({', '.join(self.state_names)})."))  # fmt: skip
        return StateArguments(self.state_names, tuple(state))

    def places(
        self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, ...]]:
        """Names of the arguments that `state` could be, the first one first; several for a tuple."""
        taken = self.static_names | kwargs.keys()
        by_name = [
            p.name
            for p in self.parameters.parameters.values()
            if p.kind == p.KEYWORD_ONLY and p.name not in taken
        ]
        is_tuple = isinstance(state, tuple | list) and len(state) > 1
        sizes = [1, len(state)] if is_tuple else [1]
        for num, k in [(n, k) for n in sizes for k in range(min(n, len(by_name)) + 1)]:
            num_args = len(args) + num - k
            for named in itertools.combinations(by_name, k):
                with contextlib.suppress(TypeError):  # Too many arguments, or too few.
                    bound = self.parameters.bind(*range(num_args), **kwargs, **dict.fromkeys(named))
                    names = [*flat_arguments(bound)][:num_args]
                    free = [name for name in names if name not in self.static_names]
                    yield from [(*x, *named) for x in itertools.combinations(free, num - k)]

    def with_state(
        self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        waiting = dict(zip(self.state_names, [value for _, value in parts(state)], strict=True))
        at = {_place(self.parameters, name): name for name in waiting}
        placed, others = list[Any](), list(args)
        while others or len(placed) in at:
            name = at.get(len(placed))
            placed.append(others.pop(0) if name is None else waiting.pop(name))
        return placed, {**waiting, **kwargs}

    def argnums(self, names: Sequence[str]) -> str:
        """The option by which a user declares these arguments as the state: `state=(0, 1)`."""
        places = [_place(self.parameters, name) for name in names]
        if math.inf in places:
            return f"state={repr(names[0]) if len(names) == 1 else tuple(names)}"
        numbers = sorted(map(int, places))
        return f"state={numbers[0] if len(numbers) == 1 else tuple(numbers)}"

    def in_order(self, names: Collection[str]) -> tuple[str, ...]:
        return _in_order(self.parameters, names)

    def of_state(self, names: Collection[str]) -> Signature:
        """The signature with these arguments as the state; if found a second time, for good."""
        state, found = self.in_order(names), not self.found
        return dataclasses.replace(
            self, state_names=state, declared=True, found=found, _bindings={}
        )

    @property
    def may_change(self) -> bool:
        """Whether the step's results may still show that other arguments are the state."""
        return (self.found or not self.declared) and not self.settled

    def of_objects(self, static: Sequence[tuple[str, Any]]) -> Signature:
        """The signature with the arguments that hold NNX objects as the state, if a call has some."""
        graph = dict(static).get(_OBJECTS)
        if graph is None:
            return self
        return dataclasses.replace(self, state_names=graph.names, declared=True, takes_objects=True)

    def call(
        self, step_fn: Callable[..., Any], state: Any, arrays: Mapping[str, Any],
        static: Sequence[tuple[str, Any]],
    ) -> Any:  # fmt: skip
        """Calls the step like the user; a step with NNX objects returns a `Mutated`."""
        *others, last = [*static] or [("", None)]
        if last[0] == _OBJECTS:
            graph: _objects.Graph = last[1]

            def run(values: tuple[Any, ...]) -> Any:
                held = values[0] if len(values) == 1 else StateArguments(graph.names, values)
                return self.of_objects(static).call(step_fn, held, arrays, others)

            return graph.run(state, run, WHO)
        several = isinstance(state, StateArguments)
        found = dict(parts(state)) if several else {self.state_names[0]: state}
        values = {**found, **arrays, **dict(static)}
        parts_of = values.pop(_MODULES, None)
        values |= {name: part.whole(values[name]) for name, part in parts_of or ()}
        outs = call_by_name(self.parameters, step_fn, values)
        arrays, rest = (outs, None) if parts_of is None else _modules.apart(outs)
        return outs if rest is None else _modules.Filtered(arrays, rest)


def _in_order(signature: inspect.Signature, names: Collection[str]) -> tuple[str, ...]:
    known = list(signature.parameters)

    def key(name: str) -> tuple[int, int, str]:
        at, _, number = name.partition("[")
        index = known.index(at) if at in known else len(known)  # of **kwargs by name
        return index, int(number[:-1] or 0), name

    return tuple(sorted(names, key=key))


def _place(signature: inspect.Signature, name: str) -> float:
    """The position of an argument; infinite if it is passed by name only."""
    at, _, number = name.partition("[")
    by_name = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    if at not in signature.parameters or signature.parameters[at].kind in by_name:
        return math.inf
    return list(signature.parameters).index(at) + int(number[:-1] or 0)


def _name_of(fn: Callable[..., Any]) -> str:
    fn = fn.func if isinstance(fn, functools.partial) else fn
    return str(getattr(fn, "__name__", type(fn).__name__))


def _quoted(names: Sequence[str], of: Collection[str]) -> str:
    return ", ".join(repr(name) for name in names if name in of)


def flat_arguments(
    bound: inspect.BoundArguments, before: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """Arguments by name, those of `*args` as `args[0]`, ..., after the `before['args']` first ones."""
    flat: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind == inspect.Parameter.VAR_POSITIONAL:
            first = before.get(name, 0)
            flat |= {f"{name}[{i}]": item for i, item in enumerate(value, first)}
        elif kind == inspect.Parameter.VAR_KEYWORD:
            flat |= value
        else:
            flat[name] = value
    return flat


def call_by_name(
    signature: inspect.Signature, fn: Callable[..., Any], values: Mapping[str, Any]
) -> Any:
    """Calls `fn` with values by the names of `flat_arguments`; defaults apply to missing ones."""
    bound, left = inspect.BoundArguments(signature, {}), dict(values)  # type: ignore[arg-type]
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_POSITIONAL:
            num = sum(key.startswith(f"{name}[") for key in left)
            if num:  # Otherwise the parameters before may be passed by name.
                bound.arguments[name] = tuple([left.pop(f"{name}[{i}]") for i in range(num)])
        elif parameter.kind != parameter.VAR_KEYWORD and name in left:
            bound.arguments[name] = left.pop(name)
    for name, parameter in signature.parameters.items():
        if parameter.kind == parameter.VAR_KEYWORD:
            bound.arguments[name] = left
    return fn(*bound.args, **bound.kwargs)


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
