# SPDX-License-Identifier: Apache-2.0
"""NNX objects as arguments of a step: their arrays are the state, and are updated in place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jzero._errors import STEP, StepError, a_type, message
from jzero.tracing._modules import apart_modules, check_unbound
from jzero.tracing._returned import find_arguments
from jzero.tracing._state_arguments import Step

FROM_NNX, INIT = "from_nnx", "init"


def kinds() -> tuple[type, ...]:
    """The classes of NNX objects; none if Flax's NNX is not imported."""
    nnx = sys.modules.get("flax.nnx")
    return () if nnx is None else (nnx.Pytree, nnx.Module, nnx.Variable)


def holds_objects(tree: Any) -> bool:
    """Whether a tree has NNX objects; the variables in an `nnx.State` do not count."""
    return isinstance(tree, kinds()) or any(map(_is_object, jax.tree.leaves(tree, is_leaf=_stops)))


def is_state(x: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(x, nnx.State)


def _is_object(x: Any) -> bool:
    return isinstance(x, kinds())


def _stops(x: Any) -> bool:
    """Whether `jax.tree` functions here take `x` for a leaf."""
    return _is_object(x) or is_state(x)


def listed(tree: Any, root: str) -> list[str]:
    """`root['a'] is a Linear` for each NNX object in a tree, as for `holds_objects`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_stops)
    return [
        f"{root}{jax.tree_util.keystr(path)} is {a_type(leaf)}"
        for path, leaf in leaves
        if _is_object(leaf)
    ]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for an object that a step returns: its number among the returned objects."""

    number: int


@jax.tree_util.register_pytree_with_keys_class
class Mutated:
    """The new state of a step's objects, and the step's result.

    `state` of an evaluation is a dict of the changed leaves by index. `graphdef`, of the objects and the
    returned ones, is None if only the variables' values have changed.
    """

    def __init__(self, state: Any, result: Any, graphdef: Any):
        self.state, self.result, self.graphdef = state, result, graphdef

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Step, Any]], Any]:
        return [(Step(""), self.state), (Step(""), self.result)], self.graphdef

    @classmethod
    def tree_unflatten(cls, graphdef: Any, children: Any) -> Mutated:
        state, result = children
        return cls(state, result, graphdef)

    def changed(self, leaves: Sequence[Any]) -> Mutated:
        """Keeps only the leaves that differ from `leaves`, the old state."""
        pairs = zip(leaves, jax.tree.leaves(self.state), strict=True)
        changed = {i: new for i, (old, new) in enumerate(pairs) if new is not old}
        return Mutated(changed, self.result, self.graphdef)


class AsPytrees(Exception):
    """Raised if a step returns new objects and changes none: it uses objects as pytrees."""


class Graph(NamedTuple):
    """The NNX objects of a call without their arrays: a part of the program's cache key, as for `nnx.jit`."""

    names: tuple[str, ...]  # Of the arguments that hold them.
    graphdef: Any  # Of the tuple of these arguments.

    def run(self, state: Any, call: Callable[[tuple[Any, ...]], Any], who: str) -> Mutated:
        """Merges the objects with `state`, passes them to `call`, and splits them again.

        Raises an error if the step changes objects that it was not given, adds or removes variables, or
        returns new objects.
        """
        from flax import nnx
        from flax.nnx import graph as graphlib

        index_ref = graphlib.IndexMap()
        objects = nnx.unflatten(self.graphdef, state, index_ref=index_ref, copy_variables=True)
        with explained(who):
            outs = call(objects)
        nodes, tree = jax.tree.flatten(outs, is_leaf=_stops)
        returned = [node for node in nodes if _is_object(node)]
        numbers = iter(range(len(returned)))
        placed = [_Place(next(numbers)) if _is_object(x) else x for x in nodes]
        outer = graphlib.RefMap.from_indexmap(index_ref)
        inner = graphlib.RefMap()
        graphdef, flat = nnx.flatten((objects, returned), ref_index=inner, ref_outer_index=outer)
        new = nnx.from_flat_state([(path[1:], leaf) for path, leaf in flat if path[0] == 0])
        if any(path[0] == 1 for path, _ in flat):
            leaves, olds = jax.tree.leaves(new), jax.tree.leaves(state)
            if len(leaves) == len(olds) and all(map(operator.is_, leaves, olds)):
                raise AsPytrees
            raise StepError(message(
                who, listed(outs, "result"),
                "A step changes the objects passed to it, or returns others, which are its state as pytrees.",
                f"Update those passed to it: nnx.update({self.names[0]}, ...); or return nnx.state(...) of "
                "the new one.", "results"))  # fmt: skip
        structure: Any = jax.tree.structure(new)
        if structure != jax.tree.structure(state):
            before = nnx.merge(self.graphdef, state, copy=True)
            raise StepError(message(
                who, changes_of(self.names, before, objects),
                "A step keeps the variables of its objects, which are sharded.",
                "Create variables when the model is built, and set their values: variable[...] = value.",
                "things"))  # fmt: skip
        plain = any(not isinstance(leaf, nnx.Variable) for _, leaf in flat)
        moved = any(outer.get(node) != number for node, number in inner.items())
        changes = moved or returned or plain or nnx.graphdef(objects) != self.graphdef
        result = jax.tree.unflatten(tree, placed)
        return Mutated(new, result, graphdef if changes else None)


class Objects:
    """The NNX objects of a call: the arguments `values` that hold them, their `graph` and `state`."""

    def __init__(self, named: Mapping[str, Any]):
        from flax import nnx
        from flax.nnx import graph as graphlib

        self.values = tuple(named.values())
        self._refs = graphlib.RefMap()
        graphdef, flat = nnx.flatten(self.values, ref_index=self._refs)
        self.graph, self.state = Graph(tuple(named), graphdef), nnx.from_flat_state(flat)

    @classmethod
    def of(cls, who: str, named: Mapping[str, Any]) -> Objects:
        """The objects of arguments, which must hold nothing else, and not be under `nnx.cached_partial`."""
        from flax.nnx import graph as graphlib

        context: Any = graphlib.GRAPH_CONTEXT
        if context.tmp_static_cache is not None:
            # Otherwise Flax raises its own error instead of this one.
            context.tmp_static_cache = None
            _refuse_cached(who)
        bad = [
            f"{name}{jax.tree_util.keystr(path)} is {a_type(leaf)} beside NNX objects"
            for name, value in named.items()
            if not _is_object(value)
            for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=_stops)
            if not _is_object(leaf)
        ]
        if bad:
            raise StepError(message(
                who, bad, "Objects are the state, which is changed in place, and arrays are the batch.",
                "Pass them as arguments of their own; or make all of it the state: step_fn, state = "
                "jzero.from_nnx(step, ...).", "leaves"))  # fmt: skip
        return cls(named)

    def update(self, mutated: Mutated) -> Any:
        """Writes a step's new state into the objects, and returns the step's result."""
        from flax import nnx
        from flax.nnx import graph as graphlib

        new, graphdef = mutated.state, mutated.graphdef
        if isinstance(new, dict):  # Of an evaluation.
            leaves, tree = jax.tree.flatten(self.state)
            new = jax.tree.unflatten(tree, [new.get(i, leaf) for i, leaf in enumerate(leaves)])
        if graphdef is None:
            self.set(new)
            return mutated.result
        outer = graphlib.IndexMap.from_refmap(self._refs)
        state: Any = nnx.State({0: new})
        _, returned = nnx.unflatten(graphdef, state, outer_index_outer_ref=outer)
        return jax.tree.map(
            lambda x: returned[x.number] if isinstance(x, _Place) else x,
            mutated.result,
            is_leaf=lambda x: isinstance(x, _Place),
        )

    def set(self, state: Any) -> None:
        from flax import nnx

        nodes, others = (
            jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
            for tree in (self.state, state)
        )
        if not all(isinstance(node, nnx.Variable) for node in nodes):
            nnx.update(self.values, state)  # Slower, but it also sets arrays that are attributes.
            return
        for variable, other in zip(nodes, others, strict=True):
            variable.update_from_state(other)


class Contents:
    """The leaves of a tree, and of the NNX objects in it, which are changed in place."""

    def __init__(self, tree: Any):
        self._tree = tree
        nodes = jax.tree.leaves(tree, is_leaf=_stops)
        self._objects = tuple([x for x in nodes if _is_object(x)])
        others = [x for x in nodes if not _is_object(x)]
        self.leaves = jax.tree.leaves(
            (others, Objects({"": self._objects}).state if self._objects else ())
        )

    def mapped(self, fn: Callable[[Any], Any]) -> Any:
        """Maps `fn` over all leaves; the objects hold the new ones."""
        self.map_objects(fn)
        return jax.tree.map(
            lambda x: x if _is_object(x) else jax.tree.map(fn, x), self._tree, is_leaf=_stops
        )

    def map_objects(self, fn: Callable[[Any], Any]) -> None:
        if self._objects:
            objects = Objects({"": self._objects})
            objects.set(jax.tree.map(fn, objects.state))


class Born:
    """Splits objects and modules that are created under a trace, which can return arrays only."""

    def __init__(self) -> None:
        self._whole: Callable[[Any], Any] = lambda state: state

    def state(self, made: Any) -> Any:
        arrays, static = apart_modules(made)
        if static is not None:
            self._whole = static.whole
        if not holds_objects(arrays):
            return arrays
        from flax import nnx

        graphdef, state = nnx.split(arrays)
        self._whole = functools.partial(nnx.merge, graphdef)
        return state

    def whole(self, state: Any) -> Any:
        """The objects and modules with the arrays of `state`."""
        return self._whole(state)


@contextlib.contextmanager
def explained(who: str) -> Iterator[None]:
    """Explains Flax's `TraceContextError`: a step, or an `init_fn`, changes an object of another trace."""
    if not kinds():
        yield
        return
    from flax.errors import TraceContextError

    try:
        yield
    except TraceContextError as error:
        what = str(error).split(" (")[0]
        if who == INIT:
            raise StepError(message(
                who, f"init_fn changes an object that was there before ({what})",
                "What init_fn makes it makes alone.", "Make nnx.Rngs inside: train_step.init(lambda seed: "
                "Net(nnx.Rngs(seed)), 0).")) from error  # fmt: skip
        edit = f", and pass it to {FROM_NNX}" if who == FROM_NNX else ", and pass it with each call"
        raise StepError(message(
            who, f"train_step changes an object that was not passed to it ({what})",
            "What a step changes, and what nnx.grad, nnx.jit or nnx.scan change in it, are arguments of "
            "these.", f"Make the object a parameter of train_step{edit}.")) from error  # fmt: skip


def changes_of(names: Sequence[str], before: Any, after: Any) -> list[str]:
    """Differences of objects beside their variables' values: 'model.dropout.deterministic was True'."""
    old, new = _structure(names, before), _structure(names, after)
    lines, ends = list[str](), set[str]()
    for path in sorted({*old, *new}):
        if any(path.startswith((f"{end}.", f"{end}[")) for end in ends):
            continue  # Its parent is in the list.
        if (path in old) != (path in new):
            ends.add(path)
        if path not in old:
            lines.append(f"train_step adds {path} ({new[path]})")
        elif path not in new:
            lines.append(f"train_step removes {path} ({old[path]}), or shares it")
        elif old[path] != new[path]:
            lines.append(f"{path} was {old[path]} and becomes {new[path]}")
    return lines or ["train_step changes its variables' metadata"]


def _structure(names: Sequence[str], objects: Any) -> dict[str, str]:
    from flax import nnx

    found = {}
    paths: Any = ((path, value) for path, value in nnx.iter_graph(objects) if path)
    for (first, *rest), value in paths:
        if any(str(part).startswith("_pytree__") for part in rest):
            continue
        parts = [f".{part}" if isinstance(part, str) else f"[{part}]" for part in rest]
        variable = isinstance(value, nnx.Variable | nnx.Pytree | jax.Array)
        text = a_type(value) if variable else f"{value!r:.40}"
        text = "an array" if isinstance(value, jax.Array) else text
        found["".join([names[first], *parts])] = text
    return found


def check_kept(arrays: Mapping[str, Any], leaves: Sequence[Any]) -> None:
    """Refuses changes of NNX objects that are passed as pytrees beside the state, which would be lost."""
    if not kinds() or not any(map(holds_objects, arrays.values())):
        return
    left = iter(leaves)
    bad = [
        f"{name} is changed by the step"
        for name, tree in arrays.items()
        if sum(x is not next(left, None) for x in jax.tree.leaves(tree))
    ]
    if bad:
        raise StepError(message(
            STEP, bad, "NNX objects beside a state that is none are pytrees, whose changes would be lost.",
            "Drop state=, and the step's changes to objects are kept; or pass them to jzero.from_nnx.",
            "arguments"))  # fmt: skip


def check_no_state(names: Sequence[str], outs: Any, arrays: Mapping[str, Any]) -> None:
    """Refuses state among the other arguments, such as optax's: it would be sharded like the batch."""
    found = find_arguments(outs, arrays).state
    if found:
        given = ", ".join(names)
        raise StepError(message(
            STEP, [f"{name} comes back, beside NNX objects ({given})" for name in found],
            "NNX objects are all of a step's state, and everything else is the batch.",
            f"Write step_fn, state = jzero.from_nnx(step, {given}), and shard_train_step(step_fn, "
            f"state={('state', *found)}).", "arguments"))  # fmt: skip


def _refuse_cached(who: str) -> None:
    raise StepError(message(
        who, "nnx.cached_partial has the objects of the step", "The objects are arguments of each call.",
        "Call it with them, train_step(model, optimizer, batch); or split them once: "
        "step_fn, state = jzero.from_nnx(step, model, optimizer)."))  # fmt: skip


def check_partial(train_step: Any, who: str) -> None:
    """Refuses objects bound by `functools.partial`, `nnx.cached_partial` or a module's method."""
    code = getattr(train_step, "__code__", None)
    if kinds() and code is not None and code.co_name == "cache_args_wrapper":
        _refuse_cached(who)
    check_unbound(train_step, who)
    if isinstance(train_step, functools.partial):
        bad = listed((train_step.args, train_step.keywords), "partial")
        if bad:
            raise StepError(message(
                who, bad, "Objects bound by a partial are no arguments, and no state.",
                "Pass them with each call, or pass them to from_nnx, with the function inside the partial.",
                "objects"))  # fmt: skip
