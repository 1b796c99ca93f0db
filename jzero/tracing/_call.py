"""How a step is called: binding arguments to names, static ones, keys, and how each is split."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jzero._errors import BatchError, OptionError, StateError, StepError, describe_leaf, message

WHO = "shard_train_step"
_REST = inspect.Parameter.VAR_POSITIONAL


class Call(NamedTuple):
    """One call, taken apart: the state, the other array arguments by name, and what is static."""

    state: Any
    arrays: dict[str, Any]
    static: tuple[tuple[str, Hashable], ...]


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


def leaf_paths(tree: Any, root: str) -> list[str]:
    """`root['w']`, ... for every leaf, in the order of `jax.tree.leaves`."""
    return [
        root + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def argument_paths(arrays: Mapping[str, Any]) -> list[str]:
    """The paths of all leaves of the arguments beside the state."""
    return [path for name, tree in arrays.items() for path in leaf_paths(tree, name)]


def is_key(dtype: Any, shape: Sequence[int]) -> bool:
    """Typed PRNG keys, and single old-style ones (`uint32[2]`)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return True
    return dtype == np.uint32 and tuple(shape) == (2,)


def signature_of(tree: Any) -> tuple[Any, ...]:
    """What tells two calls apart, quick to compute. Leaves may be anything."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, marks(leaves)


def marks(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """The same of leaves."""
    return tuple(
        (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        else type(leaf)
        for leaf in leaves
    )


def abstract(tree: Any, root: str) -> Any:
    """Shapes and dtypes of a tree's leaves, as JAX will see them; non-arrays are errors."""
    bad, out = [], []
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in enumerate(leaves):
        try:
            out.append(abstract_leaf(leaf))
        except (TypeError, ValueError):
            bad.append(i)
    if bad:
        paths = leaf_paths(tree, root)  # Costs more than the check, which every step makes.
        found = [f"{paths[i]} is a {type(leaves[i]).__name__}: {leaves[i]!r:.60}" for i in bad]
        cls = StateError if root == "state" else BatchError
        raise cls(message(
            WHO, found, "Every leaf must be an array, a NumPy array or a Python number.",
            "Declare such an argument in static_argnames, or make it a static field of its "
            "container (flax.struct.field(pytree_node=False)).",
        ))  # fmt: skip
    return jax.tree.unflatten(treedef, out)


def abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and weak type of one leaf."""
    if isinstance(leaf, (bool, int, float, complex)):
        aval = jnp.result_type(leaf)
        return jax.ShapeDtypeStruct((), aval, weak_type=not isinstance(leaf, bool))
    if isinstance(leaf, (np.ndarray, np.generic)):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(leaf.shape, dtype)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(leaf)
    return jax.ShapeDtypeStruct(
        tuple(leaf.shape), leaf.dtype, weak_type=bool(getattr(leaf, "weak_type", False))
    )


def rows_of_arguments(
    arrays: Mapping[str, Any], specs: Mapping[str, Any], axes: Mapping[str, int]
) -> list[int | None]:
    """The dim of each leaf that is the batch's: dim 0, or the one that `in_specs` splits over all data axes.

    What has fewer rows than there are devices is whole, unless nothing has more. It decides only costs.

    Raises:
      BatchError: a spec that does not fit its leaf.
    """
    most = max((leaf.shape[0] for leaf in jax.tree.leaves(arrays) if leaf.shape), default=1)
    fewest = max(1, min(most, math.prod(axes.values())))
    out: list[int | None] = []
    bad: list[str] = []
    for name, tree in arrays.items():
        leaves, treedef = jax.tree.flatten(tree)
        overrides = _broadcast_specs(name, specs[name], treedef) if name in specs else None
        for i, (path, leaf) in enumerate(zip(leaf_paths(tree, name), leaves, strict=True)):
            if overrides is None:
                out.append(0 if leaf.shape and leaf.shape[0] >= fewest else None)
                continue
            bad += _unknown(path, leaf, overrides[i], axes)
            names = [set(spec_axes(entry)) for entry in overrides[i]]
            out.append(names.index(set(axes)) if set(axes) in names else None)
    if bad:
        raise BatchError(message(
            WHO, bad, "A spec says which dim of an argument is split over the data axes.",
            "Correct it, or drop it to split dim 0."))  # fmt: skip
    return out


def _unknown(path: str, leaf: Any, spec: P, axes: Mapping[str, int]) -> list[str]:
    what = describe_leaf(path, leaf.shape, leaf.dtype)
    if len(spec) > len(leaf.shape):
        return [f"{what} has fewer dims than its spec {spec}"]
    names = [name for entry in spec for name in spec_axes(entry) if name not in axes]
    if names:
        return [f"{what}: its spec {spec} names axis {names[0]!r}; the data axes are {tuple(axes)}"]
    return []


def argument_specs(
    arrays: Mapping[str, Any], specs: Mapping[str, Any], axes: Mapping[str, int], accumulate: int
) -> list[P]:
    """A PartitionSpec per leaf: dim 0 split over all data axes; scalars and keys on every device.

    Microbatches are devices in time: the last of the `axes` counts them in.

    Raises:
      BatchError: leaves whose dim is not divisible by the devices, all at once.
    """
    out: list[P] = []
    bad: list[str] = []
    for name, tree in arrays.items():
        leaves, treedef = jax.tree.flatten(tree)
        overrides = _broadcast_specs(name, specs[name], treedef) if name in specs else None
        for i, (path, leaf) in enumerate(zip(leaf_paths(tree, name), leaves, strict=True)):
            spec = overrides[i] if overrides is not None else _default_spec(leaf, tuple(axes))
            bad += _misfits(path, leaf, spec, axes, accumulate)
            out.append(spec)
    if bad:
        raise BatchError(message(
            WHO, bad, "Each device gets an equal part of every argument.",
            "Change the batch size (drop or pad the remainder), use fewer devices, or keep the "
            "argument whole on every device with in_specs={'<argument>': jax.P()}.",
        ))  # fmt: skip
    return out


def _default_spec(leaf: Any, axes: tuple[str, ...]) -> P:
    if not leaf.shape or is_key(leaf.dtype, leaf.shape):
        return P()
    return P(axes if len(axes) > 1 else axes[0])


def _broadcast_specs(name: str, spec: Any, treedef: Any) -> list[P]:
    def is_spec(x: Any) -> bool:
        return isinstance(x, P) or x is None

    try:
        tree = jax.tree.unflatten(treedef, range(treedef.num_leaves))
        spread = jax.tree.map(
            lambda s, sub: jax.tree.map(lambda _: s or P(), sub), spec, tree, is_leaf=is_spec
        )
        return jax.tree.leaves(spread, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        raise OptionError(message(
            WHO, f"in_specs[{name!r}] does not fit the argument: {error}",
            "It is one PartitionSpec, or a tree prefix of them.", "Match the argument's structure.",
        )) from None  # fmt: skip


def _misfits(path: str, leaf: Any, spec: P, axes: Mapping[str, int], accumulate: int) -> list[str]:
    what = describe_leaf(path, leaf.shape, leaf.dtype)
    unknown = _unknown(path, leaf, spec, axes)
    if unknown:
        return unknown
    for dim, entry in enumerate(spec):
        names = spec_axes(entry)
        parts = math.prod(axes[name] for name in names)
        if leaf.shape[dim] % parts:
            num = accumulate if tuple(axes)[-1] in names else 1
            times = f" x {num} microbatches" if num > 1 else ""
            return [
                f"{what}: dim {dim} of size {leaf.shape[dim]} does not divide by "
                f"{parts // num} devices{times}"
            ]
    split = {name for entry in spec for name in spec_axes(entry)}
    if accumulate > 1 and split and split != set(axes):
        return [f"{what}: accumulate needs its spec {spec} to name all data axes {tuple(axes)}"]
    return []


def microbatch_dim(spec: P, axes: Mapping[str, int]) -> int | None:
    """The dim along which an argument is cut into microbatches: that of the last axis."""
    last = tuple(axes)[-1]
    return next((dim for dim, entry in enumerate(spec) if last in spec_axes(entry)), None)


def spec_axes(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def local_aval(leaf: Any, spec: P, axes: Mapping[str, int]) -> jax.ShapeDtypeStruct:
    """What one device sees of an argument in one microbatch."""
    shape = list(leaf.shape)
    for dim, entry in enumerate(spec):
        for name in spec_axes(entry):
            shape[dim] //= axes[name]
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=leaf.weak_type)
