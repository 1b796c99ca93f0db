# SPDX-License-Identifier: Apache-2.0
"""Factors: which dims of an equation's operands and results are one dim, as in Shardy's `OpShardingRule`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax import lax

from jzero.tracing._types import Atom, Eqn

Params = dict[str, Any]  # of an equation
# For each operand, for each of its dims: the dim of the results that it becomes, or None.
DimMaps = list[tuple[int | None, ...]]
FactorDims = tuple[int | None, ...]  # for each operand, or for each result: its dim, or None


def _unchanged(size: int, num: int) -> Params:
    return {}


class Factor(NamedTuple):
    """A dim along which an equation may run on blocks of its operands; each gives a block of its results."""

    ins: FactorDims
    outs: FactorDims  # All None if reduced; if only one of several is, all blocks give the same.
    reduces: str | None = None  # 'sum', 'prod', 'max', 'min', 'and' or 'or'
    # (size, num): parameters for one of `num` blocks. `size` is the block's, in the results, or in the
    # operands if reduced.
    local: Callable[[int, int], Params] = _unchanged
    groups: int = 0  # The dim consists of so many groups, which no block may cut; 0 if of none.


FactorsOf = Callable[[Eqn], list[Factor]]


def none(eqn: Eqn) -> list[Factor]:
    return []


# -- each dim of an operand becomes one of the results, or is gone ---------------------------------------


def mapped(
    maps: Callable[[Eqn], DimMaps], resized: str = "", reduces: str | None = None
) -> FactorsOf:
    """The factors of dim maps; the parameter `resized`, if any, holds the results' sizes."""

    def factors(eqn: Eqn) -> list[Factor]:
        return _of_maps(eqn, maps(eqn), resized, reduces)

    return factors


def _of_maps(eqn: Eqn, maps: DimMaps, resized: str, reduces: str | None) -> list[Factor]:
    num, found = len(eqn.outvars), list[Factor]()
    for out in range(len(eqn.outvars[0].aval.shape)):
        ins = tuple(dims.index(out) if out in dims else None for dims in maps)
        if any(dim is not None for dim in ins):
            local = functools.partial(_resized, eqn, resized, out) if resized else _unchanged
            found.append(Factor(ins, (out,) * num, local=local))
    if reduces is not None:
        gone = [dim for dim, out in enumerate(maps[0]) if out is None]
        found += [Factor((dim,), (None,), reduces) for dim in gone]
    return found


def _resized(eqn: Eqn, param: str, dim: int, size: int, num: int) -> Params:
    return {param: with_size(eqn.params[param], dim, size)}


def with_size(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _shapes(eqn: Eqn) -> list[tuple[int, ...]]:
    return [atom.aval.shape for atom in eqn.invars]


def _out_shape(eqn: Eqn) -> tuple[int, ...]:
    shape: tuple[int, ...] = eqn.outvars[0].aval.shape
    return shape


def _same_dims(shape: Sequence[int], out: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(d if size == out[d] else None for d, size in enumerate(shape))


def elementwise(eqn: Eqn) -> list[Factor]:
    """Scalars and dims of size 1 are broadcast by elementwise primitives."""
    return [*_elementwise(tuple(_shapes(eqn)), _out_shape(eqn), len(eqn.outvars))]


@functools.lru_cache(maxsize=2**12)
def _elementwise(
    shapes: tuple[tuple[int, ...], ...], out: tuple[int, ...], num: int
) -> tuple[Factor, ...]:
    return tuple([
        Factor(tuple([d if s and s[d] == size else None for s in shapes]), (d,) * num)
        for d, size in enumerate(out)
    ])  # fmt: skip


def permuted(eqn: Eqn) -> DimMaps:
    permutation = eqn.params["permutation"]
    return [tuple(permutation.index(d) for d in range(len(permutation)))]


def _without(ndim: int, gone: Sequence[int]) -> tuple[int | None, ...]:
    left = _free(ndim, gone)
    return tuple(left.index(d) if d in left else None for d in range(ndim))


def without(param: str) -> Callable[[Eqn], DimMaps]:
    return lambda eqn: [_without(len(shape), eqn.params[param]) for shape in _shapes(eqn)]


def all_but(param: str) -> Callable[[Eqn], DimMaps]:
    def dims(eqn: Eqn) -> DimMaps:
        gone, num = eqn.params[param], len(_shapes(eqn)[0])
        gone = [d % num for d in (gone if isinstance(gone, tuple) else (gone,))]
        return [tuple(None if d in gone else d for d in range(len(s))) for s in _shapes(eqn)]

    return dims


def shifted(param: str, by: int) -> Callable[[Eqn], DimMaps]:
    """`by=1` inserts a dim at the parameter's, `by=-1` removes that dim.

    `tiled` collectives neither insert nor remove one, and mix the elements along it.
    """

    def dims(eqn: Eqn) -> DimMaps:
        axis, shift = eqn.params[param], 0 if eqn.params.get("tiled") else by
        gone = [axis] if shift < 1 else []
        return [
            tuple(None if d in gone else d + shift * (d >= axis) for d in range(len(shape)))
            for shape in _shapes(eqn)
        ]

    return dims


def windowed(eqn: Eqn) -> DimMaps:
    """Slices, updates of slices and pads: dims that they take whole are kept. Indices are scalars."""
    kept = _same_dims(_shapes(eqn)[0], _out_shape(eqn))
    if eqn.primitive.name == "slice":
        strides = eqn.params["strides"] or (1,) * len(kept)
        kept = tuple(None if step != 1 else d for d, step in zip(kept, strides, strict=True))
    if eqn.primitive.name == "pad":
        config = eqn.params["padding_config"]
        kept = tuple(
            d if c == (0, 0, 0) else None for d, c in zip(kept, map(tuple, config), strict=True)
        )
    if eqn.primitive.name == "dynamic_update_slice":
        kept = _same_dims(_shapes(eqn)[1], _shapes(eqn)[0])
        return [kept, kept, *(() for _ in eqn.invars[2:])]
    return [kept, *(() for _ in eqn.invars[1:])]


def reduction(reduces: str | None = None, of_bools: str | None = None) -> FactorsOf:
    def factors(eqn: Eqn) -> list[Factor]:
        kind = of_bools if eqn.invars[0].aval.dtype == bool else reduces
        return _of_maps(eqn, without("axes")(eqn), "", kind or reduces)

    return factors


def broadcast(eqn: Eqn) -> list[Factor]:
    out, places = _out_shape(eqn), eqn.params["broadcast_dimensions"]
    operand, *dynamic = _shapes(eqn)
    source = {p: d for d, (n, p) in enumerate(zip(operand, places, strict=True)) if n == out[p]}
    return [
        Factor((source.get(d), *(None for _ in dynamic)), (d,),
               local=functools.partial(_resized, eqn, "shape", d))
        for d in range(len(out))
    ]  # fmt: skip


def iota(eqn: Eqn) -> list[Factor]:
    nothing, along = (None,) * len(eqn.invars), eqn.params["dimension"]
    return [
        Factor(nothing, (d,), local=functools.partial(_resized, eqn, "shape", d))
        for d in _free(len(_out_shape(eqn)), [along])
    ]


def reshape(eqn: Eqn) -> list[Factor]:
    """A dim's blocks stay blocks if it has the same stride as a dim of the result."""
    (shape, *others), out = _shapes(eqn), _out_shape(eqn)
    if eqn.params.get("dimensions") is not None or 0 in shape or others:
        return []
    starts = {math.prod(out[:d]): d for d, size in enumerate(out) if size > 1}
    found = []
    for d, size in enumerate(shape):
        to = starts.get(math.prod(shape[:d]))
        if size > 1 and to is not None:
            local = functools.partial(_resized, eqn, "new_sizes", to)
            groups = 0 if size == out[to] else math.gcd(size, out[to])
            found.append(Factor((d,), (to,), local=local, groups=groups))
    return found


# -- products, look-ups, linear algebra --------------------------------------------------------------


def _free(dims: int, *taken: Iterable[int]) -> list[int]:
    used = {dim for group in taken for dim in group}
    return [dim for dim in range(dims) if dim not in used]


def dot_general(eqn: Eqn) -> list[Factor]:
    return _product(eqn.params["dimension_numbers"], *map(len, _shapes(eqn)))


def _product(numbers: Any, lhs: int, rhs: int) -> list[Factor]:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers
    found = [Factor((a, b), (None,), "sum") for a, b in zip(lhs_sum, rhs_sum, strict=True)]
    pairs = [*zip(lhs_batch, rhs_batch, strict=True)]
    pairs += [(dim, None) for dim in _free(lhs, lhs_sum, lhs_batch)]
    pairs += [(None, dim) for dim in _free(rhs, rhs_sum, rhs_batch)]
    return found + [Factor(pair, (at,)) for at, pair in enumerate(pairs)]


# What `jax.nn.scaled_matmul` contracts; it has no parameter for it.
_LAST_OF_BOTH = (((2,), (2,)), ((0,), (0,)))


def scaled_dot(eqn: Eqn) -> list[Factor]:
    """One scale for each block of a contracted dim; along other dims scales have as many elements."""
    shapes = _shapes(eqn)
    numbers = eqn.params.get("dimension_numbers", _LAST_OF_BOTH)
    found = []
    for factor in _product(numbers, *map(len, shapes[:2])):
        ins, groups = factor.ins * 2, 0
        if factor.reduces:
            dims = zip(shapes, ins, strict=True)
            groups = math.gcd(*(shape[d] for shape, d in dims if d is not None))
        found.append(factor._replace(ins=ins, groups=groups))
    return found


def conv(eqn: Eqn) -> list[Factor]:
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
    def local(size: int, num: int) -> Params:
        return {param: groups // num}

    return Factor((lhs, rhs), (out,), local=local, groups=groups)


# Modes that clamp indices out of bounds: a window as large as its dim does not move. With a fill, no element
# that is read out of bounds counts.
CLAMPED = (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def gather(eqn: Eqn) -> list[Factor]:
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
        moved = dim in numbers.start_index_map and eqn.params["mode"] not in CLAMPED
        if sizes[dim] == operand.shape[dim] and not moved:

            def local(size: int, num: int, dim: int = dim) -> Params:
                return {"slice_sizes": with_size(sizes, dim, size)}

            found.append(Factor((dim, None), (out,), local=local))
    return found


# How devices reduce their results to one; the operand must be neutral on all but one of them.
SCATTER_REDUCES = {
    "scatter-add": "sum", "scatter-sub": "sum", "scatter-max": "max", "scatter-min": "min",
}  # fmt: skip


def scatter(eqn: Eqn) -> list[Factor]:
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
        moved = dim in numbers.scatter_dims_to_operand_dims
        if whole and not (moved and eqn.params["mode"] not in CLAMPED):
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


def leading(trailing: int | Callable[[Eqn], int]) -> FactorsOf:
    def factors(eqn: Eqn) -> list[Factor]:
        num = trailing if isinstance(trailing, int) else trailing(eqn)
        return _same(list(range(eqn.invars[0].aval.ndim - num)), eqn)

    return factors


_NO_WINDOW = {
    "window_dimensions": 1, "window_strides": 1, "padding": (0, 0), "base_dilation": 1, "window_dilation": 1,
}  # fmt: skip


def window(eqn: Eqn) -> list[Factor]:
    def untouched(dim: int) -> bool:
        return all(
            eqn.params[name][dim] == none if name != "padding" else tuple(eqn.params[name][dim]) == none
            for name, none in _NO_WINDOW.items()
            if name in eqn.params
        )  # fmt: skip

    return _same([d for d in range(eqn.invars[0].aval.ndim) if untouched(d)], eqn)


def bitcast(eqn: Eqn) -> list[Factor]:
    """Narrower words add a last dim, and wider ones remove it."""
    before, after = eqn.invars[0].aval.ndim, eqn.outvars[0].aval.ndim
    return _same(list(range(min(before, after))), eqn)


def triangular_solve(eqn: Eqn) -> list[Factor]:
    ndim = eqn.invars[1].aval.ndim
    free = ndim - 1 if eqn.params["left_side"] else ndim - 2
    return [*leading(2)(eqn), Factor((None, free), (free,))]


def tridiagonal_solve(eqn: Eqn) -> list[Factor]:
    free = eqn.invars[3].aval.ndim - 1
    return [*leading(1)(eqn), Factor((None, None, None, free), (free,))]


def tile(eqn: Eqn) -> list[Factor]:
    return _same([d for d, num in enumerate(eqn.params["reps"]) if num == 1], eqn)


def ragged_dot(eqn: Eqn) -> list[Factor]:
    """Factors of all dims that are not ragged or grouped.

    If the ragged dim is contracted, the result has a dim of groups in front.
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    ragged, grouped = set(numbers.lhs_ragged_dimensions), set(numbers.rhs_group_dimensions)
    lhs, rhs, sizes = (atom.aval.ndim for atom in eqn.invars[:3])
    if ragged & set(lhs_batch):
        return []
    is_summed = not ragged.isdisjoint(lhs_sum)
    pairs = zip(lhs_sum, rhs_sum, strict=True)
    found = [Factor((a, b, None), (None,), "sum") for a, b in pairs if a not in ragged]
    at = int(is_summed)
    for i, (a, b) in enumerate(zip(lhs_batch, rhs_batch, strict=True)):
        if sizes == len(lhs_batch) + 1:
            found.append(Factor((a, b, i), (at,)))
        at += 1
    for dim in _free(lhs, lhs_sum, lhs_batch):
        if dim not in ragged:
            found.append(Factor((dim, None, None), (at,)))
        at += 1
    for dim in _free(rhs, rhs_sum, rhs_batch, grouped):
        found.append(Factor((None, dim, None), (at,)))
        at += 1
    return found


# -- sparse arrays ------------------------------------------------------------------------------------


def _stored(indices: tuple[int, ...], ndim: int) -> dict[int, tuple[int, int | None]]:
    """The batch and dense dims of a `BCOO`, each with its dim in the data and in the indices.

    The sparse dims between them are one dim of the data and of the indices: the number of stored elements.
    """
    batch, by_index = len(indices) - 2, indices[-1]
    found: dict[int, tuple[int, int | None]] = {dim: (dim, dim) for dim in range(batch)}
    return found | {dim: (dim - by_index + 1, None) for dim in range(batch + by_index, ndim)}


def _of_size(atoms: Sequence[Atom], dims: FactorDims, size: int) -> FactorDims:
    """`dims` without those of size 1, by which data and indices are broadcast along a batch dim."""
    pairs = zip(atoms, dims, strict=True)
    return tuple(None if d is None or atom.aval.shape[d] != size else d for atom, d in pairs)


def _of_info(eqn: Eqn, **dims: int | None) -> Callable[[int, int], Params]:
    """`Factor.local` for parameters that hold shapes of sparse arrays, each with the dim that is cut."""

    def local(size: int, num: int) -> Params:
        found = Params()
        for name, dim in dims.items():
            if dim is not None:
                info = eqn.params[name]
                found[name] = info._replace(shape=with_size(info.shape, dim, size))
        return found

    return local


def sparse_dot(eqn: Eqn) -> list[Factor]:
    _, indices, rhs = _shapes(eqn)
    info = eqn.params["lhs_spinfo"]
    stored, found = _stored(indices, len(info.shape)), []
    for factor in _product(eqn.params["dimension_numbers"], len(info.shape), len(rhs)):
        dim, other = factor.ins
        if dim is None:
            found.append(factor._replace(ins=(None, None, other)))
        elif dim in stored:
            ins = _of_size(eqn.invars, (*stored[dim], other), info.shape[dim])
            found.append(factor._replace(ins=ins, local=_of_info(eqn, lhs_spinfo=dim)))
    return found


def sampled_dot(eqn: Eqn) -> list[Factor]:
    """A matrix product of which only the elements at `indices` are computed."""
    lhs, rhs, indices = _shapes(eqn)
    factors = _product(eqn.params["dimension_numbers"], len(lhs), len(rhs))
    stored, found = _stored(indices, len(factors)), []
    for factor in factors:
        (dim,) = factor.outs
        if dim is None:
            found.append(factor._replace(ins=(*factor.ins, None)))
        elif dim in stored:
            out, at = stored[dim]
            ins = _of_size(eqn.invars, (*factor.ins, at), _out_shape(eqn)[out])
            found.append(Factor(ins, (out,)))
    return found


def sparse_to_dense(eqn: Eqn) -> list[Factor]:
    info = eqn.params["spinfo"]
    return [
        Factor(_of_size(eqn.invars, ins, info.shape[dim]), (dim,), local=_of_info(eqn, spinfo=dim))
        for dim, ins in _stored(_shapes(eqn)[1], len(info.shape)).items()
    ]


def dense_to_sparse(eqn: Eqn) -> list[Factor]:
    indices, dense = _shapes(eqn)
    return [
        Factor(_of_size(eqn.invars, (at, dim), dense[dim]), (out,))
        for dim, (out, at) in _stored(indices, len(dense)).items()
    ]


def sparse_of_dense(eqn: Eqn) -> list[Factor]:
    return _same(list(range(eqn.params["n_batch"])), eqn)


def _to_sparse(eqn: Eqn, ins: FactorDims, out: int, **dims: int | None) -> Iterator[Factor]:
    """The factor of a sparse result's batch dim, which its data, its indices or both have."""
    name, dim = next((name, dim) for name, dim in dims.items() if dim is not None)
    size = eqn.params[name].shape[dim]
    outs = _of_size(eqn.outvars, (out, out), size)
    if outs != (None, None):
        yield Factor(_of_size(eqn.invars, ins, size), outs, local=_of_info(eqn, **dims))


def sparse_rows(eqn: Eqn) -> list[Factor]:
    """The batch dims of an operation on one sparse array, which it may permute."""
    batch, found = len(_shapes(eqn)[1]) - 2, list[Factor]()
    for out, dim in enumerate(eqn.params.get("permutation", range(batch))[:batch]):
        found += _to_sparse(eqn, (dim, dim), out, spinfo=dim)
    return found


def sparse_product(eqn: Eqn) -> list[Factor]:
    """The batch dims of a product of two sparse arrays."""
    _, lhs, _, rhs = _shapes(eqn)
    numbers, found = (((), ()), eqn.params["dimension_numbers"][1]), list[Factor]()
    for out, factor in enumerate(_product(numbers, len(lhs) - 2, len(rhs) - 2)):
        a, b = factor.ins
        found += _to_sparse(eqn, (a, a, b, b), out, lhs_spinfo=a, rhs_spinfo=b)
    return found
