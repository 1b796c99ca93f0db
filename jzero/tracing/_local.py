# SPDX-License-Identifier: Apache-2.0
"""`groups` and `per_example`: rows that are treated apart, on any number of devices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jzero._errors import BatchError, OptionError, StepError, a_type, describe_leaf, message
from jzero.tracing import _jaxpr, _lines
from jzero.tracing._internals import ad, batching, extended, mlir

# Name scopes by which the partitioner recognizes what these functions promise.
GROUPS, PER_EXAMPLE = "jzero.groups", "jzero.per_example"

_lines.not_the_users(__file__)


def groups(
    fn: Callable[..., Any], n: int, in_axes: Any = 0, out_axes: Any = 0
) -> Callable[..., Any]:
    """Runs `fn` on `n` groups of rows, each by itself: for norms and routing that are local on purpose.

    Of `B` rows the first `B // n` are the first group, and so on, whatever the devices are::

        x = x.reshape(n, B // n, ...)          # arguments with rows
        y = jax.vmap(fn)(x)
        y = y.reshape(B, ...)                  # results with rows, in their order

    So it means the same under plain `jax.jit`. In a sharded step it needs no communication, forward or
    backward, if the devices times the microbatches divide `n`. Batch norms of 32 rows each (ghost batch
    norms), in Flax::

        def forward(variables, x):
            return model.apply(variables, x, mutable=["batch_stats"])

        apply = jzero.groups(forward, len(images) // 32, in_axes=(None, 0), out_axes=(0, None))
        logits, new = apply(variables, images)
        batch_stats = jax.tree.map(lambda x: x.mean(0), new["batch_stats"])  # each came as [n, ...]

    >>> import jax.numpy as jnp, jzero
    >>> x = jnp.arange(6.0)
    >>> centred, means = jzero.groups(lambda x: (x - x.mean(), x.mean()), 2, out_axes=(0, None))(x)
    >>> centred.tolist(), means.tolist()
    ([-1.0, 0.0, 1.0, -1.0, 0.0, 1.0], [1.0, 4.0])

    A PRNG key that all groups share gives all of them the same random bits. Pass `jax.random.split(key, B)`
    with rows instead, and take the first one of the group.

    Args:
      fn: a function of pytrees of arrays; those with rows have `B // n` of them inside.
      n: how many groups.
      in_axes: as of `jax.vmap`: for each argument, or part of it, the dim of its rows; None if it is the same
        for all groups. Keyword arguments have rows along dim 0.
      out_axes: for each result, or part of it, the dim of its rows, as many as the group has; None if the
        group has one (a statistic, a loss): these are stacked along a new dim 0, `[n, ...]`.

    Returns:
      The function of `B` rows.

    Raises:
      OptionError: `n` is no int from 1, `fn` no function, or `in_axes` or `out_axes` no dims (when called: no
        prefix of the arguments or results).
      BatchError: when called: `n` does not divide the rows, arguments or results have none, or not as many.
    """
    who = "jzero.groups"
    number = _integer(n)
    if number is None or number < 1:
        raise OptionError(message(
            who, f"n={n!r}", "There is at least one group.", "Pass a Python int n >= 1."))  # fmt: skip
    n = number
    in_axes, out_axes = _options(who, fn, in_axes, out_axes)

    def grouped(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dims, size = _rows_of(who, in_axes, args, kwargs)
        if size % n:
            raise BatchError(message(
                who, f"n={n} does not divide {size} rows", "All groups have the same number of rows.",
                "Choose an n that divides them."))  # fmt: skip

        def one(*parts: Any) -> Any:
            inner, named = jax.tree.unflatten(tree, parts)
            return _arrays(who, fn(*inner, **named))

        with jax.named_scope(GROUPS):
            parts = [
                x if d is None else jnp.reshape(x, (*x.shape[:d], n, -1, *x.shape[d + 1 :]))
                for x, d in zip(leaves, dims, strict=True)
            ]
        outs = jax.vmap(one, in_axes=tuple(dims))(*parts)

        def merged(name: str, dim: int | None, y: jax.Array) -> jax.Array:
            if dim is None:
                return y
            d = _checked(who, name, dim, y.shape[1:], y.dtype)
            if y.shape[1 + d] != size // n:
                leaf = describe_leaf(name, y.shape[1:], y.dtype)
                raise BatchError(message(
                    who, f"{leaf} has not the {size // n} rows of its group along dim {d}",
                    "A group returns as many rows as are passed to it.",
                    "Name their dim in out_axes, or None: then there is one for each group, as [n, ...]."
                ))  # fmt: skip
            y = jnp.moveaxis(y, 0, d)
            return y.reshape(*y.shape[:d], -1, *y.shape[d + 2 :])

        with jax.named_scope(GROUPS):
            return _each_result(who, merged, out_axes, outs)

    return grouped


def per_example(fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """Promises that each row of what `fn` returns depends on the same row of its arguments only.

    For *opaque calls*: callbacks, FFI calls, Pallas kernels. In a sharded step these otherwise run on the
    gathered rows of all devices, since nothing says how they use them. Inside `fn` they run on each device's
    own rows; so do those of its derivatives. All other operations of `fn` are unchanged. Under plain
    `jax.jit` it is `fn`.

    >>> import jax, jax.numpy as jnp, numpy as np, jzero
    >>> def softsign(x):  # float32[B, D]
    ...     shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    ...     return jax.pure_callback(lambda x: x / (1 + np.abs(x)), shape, x, vmap_method="expand_dims")
    >>> jzero.per_example(softsign)(jnp.array([[1.0], [-3.0]])).tolist()
    [[0.5], [-0.75]]

    The promise covers the calls inside: their rows are along one dim of their operands and results, the same
    in all. It does not cover a call with a result without rows (a kernel that computes a parameter's
    gradient), a callback or FFI call with another dim as long as the batch, or a Pallas kernel that reads its
    program id along the rows: these gather, and `describe` lists them. A broken promise trains something
    else, and jzero cannot detect it.

    Effects are not covered: `io_callback` and debug callbacks get whole values, once, here too.

    `fn` is traced by itself, so that the values it closes over are known; they are the same for all rows. It
    cannot change NNX modules: call these outside. Arguments that are no arrays (`True`, "gelu") are passed
    unchanged, where `in_axes` says None.

    Args:
      fn: a function of pytrees of arrays. What it closes over is the same for all rows.
      in_axes: as of `jax.vmap`: for each argument, or part of it, the dim of its rows; None if it has none.
        Keyword arguments have rows along dim 0.
      out_axes: for each result, or part of it, the dim of its rows.

    Returns:
      The same function.

    Raises:
      OptionError: `fn` is no function, or `in_axes` or `out_axes` no dims (when called: no prefix of the
        arguments or results).
      BatchError: when called: arguments or results have no rows, or not as many.
      StepError: `fn` changes an NNX module; or, in a sharded step, the gradient of a value without rows might
        be mistaken for rows, because it is as long as the batch.
    """
    who = "jzero.per_example"
    in_axes, out_axes = _options(who, fn, in_axes, out_axes)

    def promised(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        dims, size = _rows_of(who, in_axes, args, kwargs)
        arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "dtype") and _type_of(x)}

        def whole(parts: dict[int, Any]) -> Any:
            inner, named = jax.tree.unflatten(tree, [parts.get(i, x) for i, x in enumerate(leaves)])
            return _arrays(who, fn(*inner, **named))

        with jax.named_scope(PER_EXAMPLE):
            traced = _traced(who, whole, arrays)
            ins = [_marked(x, dims[i]) for i, x in arrays.items()]
            consts = [_marked(x, None) for x in traced.consts]
            found = _jaxpr.evaluate(traced.jaxpr, consts, *ins)
            outs = jax.tree.unflatten(traced.out_tree, found)

            def left(name: str, dim: int | None, y: jax.Array) -> jax.Array:
                if dim is None or y.shape[_checked(who, name, dim, y.shape, y.dtype)] != size:
                    leaf = describe_leaf(name, y.shape, y.dtype)
                    raise BatchError(message(
                        who, f"{leaf} has not the {size} rows of the arguments",
                        "Each row of a result comes from the same row of the arguments.",
                        "Reduce over rows outside of fn, or name their dim in out_axes."))  # fmt: skip
                return _marked(y, dim % y.ndim, enters=False)

            return _each_result(who, left, out_axes, outs)

    return promised


def _options(who: str, fn: Any, in_axes: Any, out_axes: Any) -> tuple[Any, Any]:
    """Checks the options of both functions; returns `in_axes` and `out_axes` with Python ints."""
    if not callable(fn):
        raise OptionError(message(
            who, f"fn={fn!r} is no function", "It is called.", "Pass a function."))  # fmt: skip
    found = []
    for option, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        leaves, tree = jax.tree.flatten(axes, is_leaf=_is_none)
        dims = [_integer(leaf) for leaf in leaves]
        wrong = [x for x, d in zip(leaves, dims, strict=True) if x is not None and d is None]
        each = option == "out_axes" or isinstance(axes, tuple | list) or dims == [_integer(axes)]
        if wrong or not each:
            raise OptionError(message(
                who, f"{option}={axes!r}", "It is the dim of the rows or None, for all or for each of them.",
                "Pass an int, None, or " + ("a tuple with one for each argument." if option == "in_axes"
                                            else "a tree of these like that of the results.")))  # fmt: skip
        found.append(jax.tree.unflatten(tree, dims))
    return found[0], found[1]


def _is_none(x: Any) -> bool:
    return x is None


def _integer(x: Any) -> int | None:
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def _type_of(x: Any) -> Any:
    """The aval of an array; None for anything else."""
    try:
        return jax.typeof(x)
    except TypeError:
        return None


def _arrays(who: str, outs: Any) -> Any:
    """Results, after a check that all of them are arrays."""
    paths = jax.tree_util.tree_leaves_with_path(outs)
    if wrong := [
        f"output{jax.tree_util.keystr(path)} is {a_type(y)}"
        for path, y in paths
        if _type_of(y) is None
    ]:
        raise BatchError(message(who, wrong, "Results are arrays.", "Return it otherwise.",
                                 things="results", shown=8))  # fmt: skip
    return outs


def _traced(who: str, fn: Callable[..., Any], arrays: Any) -> _jaxpr.Traced:
    # Traced by itself, so that the values it closes over are known and marked as without rows. Otherwise a
    # call inside might get only a device's rows of them
    # (test_opaque.py::test_rows_that_a_promise_says_are_none).
    try:
        return _jaxpr.trace_here(fn, arrays)
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # Flax's, which need not be there.
            raise
        raise StepError(message(
            who, "fn changes an NNX module that it closes over",
            "It is traced by itself, so that what it closes over is known.",
            "Keep the callback, FFI call or kernel in fn, and call the module outside of it.",
        )) from error  # fmt: skip


def _each_result(
    who: str, fn: Callable[[str, int | None, jax.Array], jax.Array], out_axes: Any, outs: Any
) -> Any:
    """Maps `fn(name, batch dim, result)` over results."""
    results, tree = jax.tree_util.tree_flatten_with_path(outs)
    dims = _spread(who, "out_axes", out_axes, outs)
    pairs = zip(results, dims, strict=True)
    found = [fn("output" + jax.tree_util.keystr(path), dim, y) for (path, y), dim in pairs]
    return jax.tree.unflatten(tree, found)


def _rows_of(who: str, in_axes: Any, args: Any, kwargs: Any) -> tuple[list[int | None], int]:
    """The batch dim of each leaf of the arguments, and how many rows all of them have."""
    each = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
    all_dims = _spread(who, "in_axes", each, args) + [0] * len(jax.tree.leaves(kwargs))
    paths = jax.tree_util.tree_leaves_with_path((args, kwargs))
    dims: list[int | None] = []
    sizes: dict[str, int] = {}
    for dim, (path, leaf) in zip(all_dims, paths, strict=True):
        if dim is None:
            dims.append(None)
            continue
        name = ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])
        aval = _type_of(leaf)
        if aval is None:
            raise BatchError(message(
                who, f"{name} is {a_type(leaf)}", "A value with rows is an array.", _edit(name)
            ))  # fmt: skip
        dims.append(_checked(who, name, dim, aval.shape, aval.dtype))
        sizes[describe_leaf(name, aval.shape, aval.dtype)] = aval.shape[dim]
    if len(set(sizes.values())) != 1:
        raise BatchError(message(
            who, [f"{leaf} has {size} rows" for leaf, size in sizes.items()] or "no argument has rows",
            "All arguments with rows have the same number of rows.",
            "Name the dim of each one's rows in in_axes, or None where it has none."
            + f" {_BY_NAME}" * bool(kwargs), things="arguments", shown=8))  # fmt: skip
    return dims, next(iter(sizes.values()))


def _checked(who: str, name: str, dim: int, shape: tuple[int, ...], dtype: Any) -> int:
    if not -len(shape) <= dim < len(shape):
        raise BatchError(message(
            who, f"{describe_leaf(name, shape, dtype)} has no dim {dim}", "Rows are along a dim.",
            _edit(name)))  # fmt: skip
    return dim % len(shape)


_BY_NAME = (
    "Keyword arguments have their rows in dim 0: pass it by position to name its axis, or bind it with "
    "functools.partial."
)


def _edit(name: str) -> str:
    if name.startswith("kwargs"):
        return _BY_NAME
    option = "out_axes" if name.startswith("output") else "in_axes"
    return f"Name that dim in {option}, or None if there are no rows."


def _spread(who: str, option: str, axes: Any, tree: Any) -> list[int | None]:
    """The entry of `axes`, a tree prefix, for each leaf."""
    found: list[int | None] = []
    try:
        jax.tree.map(
            lambda dim, part: found.extend([dim] * len(jax.tree.leaves(part))),
            axes, tree, is_leaf=_is_none,
        )  # fmt: skip
    except ValueError:
        raise OptionError(message(
            who, f"{option}={axes!r} does not fit {jax.tree.structure(tree)}",
            f"It is one dim, or a prefix of the tree of {'arguments' if option == 'in_axes' else 'results'}.",
            "Name one for each, or for each part.")) from None  # fmt: skip
    return found


_marked_rows = extended.Primitive("marked_rows")


def _marked(x: Any, dim: int | None, enters: bool = True) -> Any:
    """`x` where it enters or leaves a `per_example` function, with rows along `dim`.

    The mark survives `grad` (what enters forward leaves backward) and `vmap`.
    """
    return _marked_rows.bind(x, dim=dim, vmapped=(), enters=enters)


def _batched_mark(
    args: Any, at: Any, *, dim: int | None, vmapped: tuple[int, ...], enters: bool
) -> tuple[Any, Any]:
    (x,), (new,) = args, at
    moved = [None if d is None else d + (d >= new) for d in (dim, *vmapped)]
    return _marked_rows.bind(x, dim=moved[0], vmapped=(new, *moved[1:]), enters=enters), new


_marked_rows.def_impl(lambda x, **_: x)
_marked_rows.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(
    _marked_rows, lambda ct, x, enters, **dims: [_marked_rows.bind(ct, enters=not enters, **dims)]
)
batching.primitive_batchers[_marked_rows] = _batched_mark
mlir.register_lowering(_marked_rows, lambda ctx, x, **_: [x])
