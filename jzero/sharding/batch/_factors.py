# SPDX-License-Identifier: Apache-2.0
"""Factors: which dims of an equation's operands and results are one dim, as rules for the batch.

The rule table of parameters' shards (`sharding/analysis/_rules.py`) says for every operand dim which output
dim it becomes. Products, convolutions, look-ups and their like need more: a dim that two operands share and
that is summed over. A *factor* says both, and serves whatever has a dim map too.

Reference: the factors of Shardy's `sdy.op_sharding_rule` say the same of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from jax import lax

from jzero.sharding.analysis import _rules
from jzero.tracing._types import Eqn


class Factor(NamedTuple):
    """One dim of an equation.

    Attributes:
      ins: which dim of each operand it is; None for an operand that does not have it.
      outs: which dim of each result; all None if it is reduced.
      reduces: 'sum', 'max' or 'min', if it is.
      local: parameters of the equation when a device has `size` of its `num` parts of the dim.
      groups: the dim is made of so many groups that no device may cut; 0 for any.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    reduces: str | None = None
    local: Callable[[int, int], _rules.Params] = lambda size, num: {}
    groups: int = 0


def factors_of(eqn: Eqn) -> list[Factor]:
    """The factors of an equation; a dim in none of them needs its whole operand."""
    structured = STRUCTURED.get(eqn.primitive.name)
    if structured is not None:
        return structured(eqn)
    rule = _ELEMENTWISE if eqn.primitive.name in MORE_ELEMENTWISE else _rules.rule_for(eqn)
    if rule is None or eqn.primitive.name == "reshape":
        return []
    return _from_dims(eqn, rule)


_ELEMENTWISE = _rules.RULES["add"]
MORE_ELEMENTWISE = frozenset({"random_fold_in", "threefry2x32"})


def _from_dims(eqn: Eqn, rule: _rules.Rule) -> list[Factor]:
    maps = rule.dims(eqn)
    found: list[Factor] = []
    for out in range(len(eqn.outvars[0].aval.shape)):
        ins = tuple(dims.index(out) if out in dims else None for dims in maps)

        def local(size: int, num: int, out: int = out) -> _rules.Params:
            return rule.local(eqn, out, size)

        if any(dim is not None for dim in ins):
            found.append(Factor(ins, (out,) * len(eqn.outvars), local=local))
    if rule.reduces is not None:
        gone = [dim for dim, out in enumerate(maps[0]) if out is None]
        found += [Factor((dim,), (None,), rule.reduces) for dim in gone]
    return found


def _free(dims: int, *taken: Iterable[int]) -> list[int]:
    used = {dim for group in taken for dim in group}
    return [dim for dim in range(dims) if dim not in used]


def _dot_general(eqn: Eqn) -> list[Factor]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = (atom.aval.ndim for atom in eqn.invars)
    found = [Factor((a, b), (None,), "sum") for a, b in zip(lhs_sum, rhs_sum, strict=True)]
    found += [
        Factor((a, b), (i,)) for i, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True))
    ]
    at = len(lhs_batch)
    for place, free in enumerate([_free(lhs, lhs_sum, lhs_batch), _free(rhs, rhs_sum, rhs_batch)]):
        for dim in free:
            found.append(Factor((None, dim) if place else (dim, None), (at,)))
            at += 1
    return found


def _conv(eqn: Eqn) -> list[Factor]:
    params = eqn.params
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    found = []
    if batch_groups == 1:
        found.append(Factor((lhs[0], None), (out[0],)))
    else:
        found.append(_group(lhs[0], rhs[0], out[1], "batch_group_count", batch_groups))
    if feature_groups == 1:
        found.append(Factor((lhs[1], rhs[1]), (None,), "sum"))
    else:
        found.append(_group(lhs[1], rhs[0], out[1], "feature_group_count", feature_groups))
    if feature_groups == batch_groups == 1:
        found.append(Factor((None, rhs[0]), (out[1],)))
    return found


def _group(lhs: int, rhs: int, out: int, param: str, groups: int) -> Factor:
    def local(size: int, num: int) -> _rules.Params:
        return {param: groups // num}

    return Factor((lhs, rhs), (out,), local=local, groups=groups)


def _cut(sizes: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


# A window as large as its dim stays where it is, wherever the indices would move it.
STAYS_INSIDE = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _gather(eqn: Eqn) -> list[Factor]:
    operand, indices = (atom.aval for atom in eqn.invars)
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    places = _free(eqn.outvars[0].aval.ndim, numbers.offset_dims)
    kept = _free(operand.ndim, numbers.collapsed_slice_dims, numbers.operand_batching_dims)
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    found = []
    for k in range(indices.ndim - 1):
        found.append(Factor((batching.get(k), k), (places[k],)))
    for dim, out in zip(kept, numbers.offset_dims, strict=True):
        moved = dim in numbers.start_index_map and eqn.params["mode"] not in STAYS_INSIDE
        if sizes[dim] == operand.shape[dim] and not moved:

            def local(size: int, num: int, dim: int = dim) -> _rules.Params:
                return {"slice_sizes": _cut(sizes, dim, size)}

            found.append(Factor((dim, None), (out,), local=local))
    return found


# What makes one result of the devices' own; the operand must be neutral on all but one of them.
SCATTER_REDUCES = {
    "scatter-add": "sum", "scatter_add": "sum", "scatter-max": "max", "scatter_max": "max",
    "scatter-min": "min", "scatter_min": "min", "scatter-sub": "sum", "scatter_sub": "sum",
}  # fmt: skip


def _scatter(eqn: Eqn) -> list[Factor]:
    operand, indices, updates = (atom.aval for atom in eqn.invars)
    numbers = eqn.params["dimension_numbers"]
    rows = _free(updates.ndim, numbers.update_window_dims)
    kept = _free(operand.ndim, numbers.inserted_window_dims, numbers.operand_batching_dims)
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    found = []
    reduces = SCATTER_REDUCES.get(eqn.primitive.name)
    for k in range(indices.ndim - 1):
        if k in batching:
            found.append(Factor((batching[k], k, rows[k]), (batching[k],)))
        elif reduces is not None:
            found.append(Factor((None, k, rows[k]), (None,), reduces))
    for dim, window in zip(kept, numbers.update_window_dims, strict=True):
        whole = updates.shape[window] == operand.shape[dim]
        moved = (
            dim in numbers.scatter_dims_to_operand_dims and eqn.params["mode"] not in STAYS_INSIDE
        )
        if whole and not moved:
            found.append(Factor((dim, None, window), (dim,)))
    return found


def _same(dims: list[int], eqn: Eqn) -> list[Factor]:
    """Dims that are the same in all operands and results that have them."""
    return [
        Factor(
            tuple(dim if atom.aval.ndim > dim else None for atom in eqn.invars),
            tuple(dim if atom.aval.ndim > dim else None for atom in eqn.outvars),
        )
        for dim in dims
    ]


def _leading(trailing: int | Callable[[Eqn], int]) -> Callable[[Eqn], list[Factor]]:
    """Operations on the last dims of their operands."""

    def factors(eqn: Eqn) -> list[Factor]:
        num = trailing if isinstance(trailing, int) else trailing(eqn)
        return _same(list(range(eqn.invars[0].aval.ndim - num)), eqn)

    return factors


def _all_but(param: str) -> Callable[[Eqn], list[Factor]]:
    def factors(eqn: Eqn) -> list[Factor]:
        ndim = eqn.invars[0].aval.ndim
        return _same(_free(ndim, [eqn.params[param] % ndim]), eqn)

    return factors


_NO_WINDOW = {
    "window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1,
}  # fmt: skip


def _window(eqn: Eqn) -> list[Factor]:
    def untouched(dim: int) -> bool:
        return all(
            eqn.params[name][dim] == none if name != "padding" else tuple(eqn.params[name][dim]) == none
            for name, none in _NO_WINDOW.items()
            if name in eqn.params
        )  # fmt: skip

    return _same([d for d in range(eqn.invars[0].aval.ndim) if untouched(d)], eqn)


def _bitcast(eqn: Eqn) -> list[Factor]:
    """To narrower words, which become a new last dim, or to wider ones."""
    before, after = eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
    return _same(list(range(min(before, after))), eqn)


def _reduce(eqn: Eqn) -> list[Factor]:
    """With any function; its arrays are followed by as many initial values."""
    arrays, name = len(eqn.outvars), "dimensions" if "dimensions" in eqn.params else "axes"
    kept = _free(eqn.invars[0].aval.ndim, eqn.params[name])
    nothing = (None,) * (len(eqn.invars) - arrays)
    return [Factor((d,) * arrays + nothing, (out,) * arrays) for out, d in enumerate(kept)]


def _triangular_solve(eqn: Eqn) -> list[Factor]:
    ndim = eqn.invars[1].aval.ndim
    free = ndim - 1 if eqn.params["left_side"] else ndim - 2
    return [*_leading(2)(eqn), Factor((None, free), (free,))]


def _tridiagonal_solve(eqn: Eqn) -> list[Factor]:
    free = eqn.invars[3].aval.ndim - 1
    return [*_leading(1)(eqn), Factor((None, None, None, free), (free,))]


def _tile(eqn: Eqn) -> list[Factor]:
    return _same([d for d, num in enumerate(eqn.params["reps"]) if num == 1], eqn)


def _stack(eqn: Eqn) -> list[Factor]:
    axis, num = eqn.params["axis"], len(eqn.invars)
    return [Factor((d,) * num, (d + (d >= axis),)) for d in range(eqn.invars[0].aval.ndim)]


def _unstack(eqn: Eqn) -> list[Factor]:
    axis, num = eqn.params["axis"], len(eqn.outvars)
    dims = _free(eqn.invars[0].aval.ndim, [axis])
    return [Factor((d,), (d - (d > axis),) * num) for d in dims]


def _ragged_dot(eqn: Eqn) -> list[Factor]:
    """Dims that no group cuts: free ones, of which the result has the same rows."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    ragged, grouped = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    lhs, rhs = (atom.aval.ndim for atom in eqn.invars[:2])
    if not ragged.isdisjoint(lhs_sum):  # Its result has a dim of groups in front.
        return []
    found = []
    if not ragged & set(lhs_batch):
        pairs = zip(lhs_sum, rhs_sum, strict=True)
        found = [Factor((a, b, None), (None,), "sum") for a, b in pairs]
    at = len(lhs_batch)
    for dim in _free(lhs, lhs_sum, lhs_batch):
        if dim not in ragged:
            found.append(Factor((dim, None, None), (at,)))
        at += 1
    for dim in _free(rhs, rhs_sum, rhs_batch, grouped):
        found.append(Factor((None, dim, None), (at,)))
        at += 1
    return found


STRUCTURED: dict[str, Callable[[Eqn], list[Factor]]] = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _conv,
    "gather": _gather,
    **dict.fromkeys(["scatter", "scatter-mul", "scatter_mul", *SCATTER_REDUCES], _scatter),
    **dict.fromkeys(["top_k"], _all_but("axis")),
    "approx_top_k": _all_but("reduction_dimension"),
    **dict.fromkeys(
        ["reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
         "select_and_scatter", "select_and_scatter_add", "select_and_gather_add"], _window),
    "bitcast_convert_type": _bitcast,
    **dict.fromkeys(["reduce", "reduce_xor"], _reduce),
    "fft": _leading(lambda eqn: len(eqn.params["fft_lengths"])),
    **dict.fromkeys(
        ["cholesky", "qr", "eig", "eigh", "svd", "lu", "geqrf", "geqp3", "hessenberg", "schur", "tridiagonal",
         "householder_product", "ormqr", "symmetric_product"], _leading(2)),
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": _tridiagonal_solve,
    **dict.fromkeys(["lu_pivots_to_permutation", "random_wrap"], _leading(1)),
    **dict.fromkeys(
        ["random_seed", "random_clone", "random_split", "random_unwrap", "random_bits",
         "random_gamma"],
        _leading(0)),
    "tile": _tile,
    "stack": _stack,
    "unstack": _unstack,
}  # fmt: skip
