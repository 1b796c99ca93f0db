# SPDX-License-Identifier: Apache-2.0
"""Rows that a step sorts, works on and puts back: each device sorts its own.

A mixture of experts without dropped tokens sorts the rows of the whole batch by expert, multiplies each
expert's rows by its matrices (`lax.ragged_dot`) and puts the results back::

    order = argsort(expert)                      # of all rows
    y = ragged_dot(x[order // k], w, bincount(expert))
    y = y[argsort(order)]                        # or zeros.at[order // k].add(y)

Nothing behind the last line depends on where the rows were in between. So the rows of each of `num` equal
blocks (a device's, or a microbatch's of it) can be sorted among themselves, and the step computes the same
but for the order of sums.

[Note: orders of rows] A value is *in order* of a sort if its rows are permuted as the sort's results are.
`Fact` says it of every value, and which integers are positions of rows of the same block. An equation that
treats rows alike gives results in order: its factor of the dim (`ir/_rules.py`) says so. Look-ups and
updates at positions take rows into an order and out of it. Any other reader of a value in order needs the
rows of the whole batch in their places, and so does a result of the jaxpr: then the sort stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import dim_groups
from jzero.ir._regions import EdgeKind, Region, edges
from jzero.ir._rows import RowDims, row_dims
from jzero.ir._writer import JaxprWriter
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


@dataclasses.dataclass(eq=False)
class Order:
    """The order of rows that a stable sort along dim 0 makes.

    Attributes:
      keys: what it sorts by, before and after.
      root: the value whose elements the keys are.
      num_values: the keys are from 0 up to it; None if that is unknown.
    """

    keys: tuple[Atom, Atom]
    root: Atom
    num_values: int | None


class Positions(NamedTuple):
    """Integers that say where rows of the same block are: among `num` rows, in an order or as given."""

    num: int
    order: Order | None


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
      order: the order of its rows; None for the batch's.
      dim: its dim of rows, if it is in order.
      positions: of which rows its elements are positions.
      is_permutation: whether these are all rows, each once.
      bounds: least and largest element of integers.
      root: the value of which it has the elements, one by one.
      counts: how many elements of the root equal 0, 1, ...: a histogram.
      is_uniform: whether all of its elements are equal.
      true_where: a boolean is true at most where the variable is zero (`("zero", x)`) or is not
        (`("other", x)`), or nowhere (`("never",)`). Or it is a `("sign", x)` or a `("rem", x)`.
      lost: orders whose positions it was computed from: it means nothing when the rows are elsewhere.
    """

    order: Order | None = None
    dim: int = 0
    positions: Positions | None = None
    is_permutation: bool = False
    bounds: tuple[int, int] | None = None
    root: Atom | None = None
    counts: Atom | None = None
    is_uniform: bool = False
    true_where: tuple[Any, ...] = ()
    lost: frozenset[Order] = frozenset()

    @property
    def orders(self) -> frozenset[Order]:
        """The orders on which its elements, or their places, depend."""
        own = self.order, self.positions and self.positions.order
        return self.lost.union(x for x in own if x is not None)

    @property
    def is_never(self) -> bool:
        return self.true_where == ("never",)


NOTHING = Fact()


class OutOfOrderError(Exception):
    """An equation needs rows in their places."""

    def __init__(self, orders: frozenset[Order]):
        super().__init__()
        self.orders = orders


def sorted_in_blocks(
    flat: _rewrite.Flat, consts: Sequence[Any], dims: Sequence[RowDims], num: int
) -> _rewrite.Flat:
    """The step with sorts of the rows of each of `num` blocks in the place of sorts of all rows.

    Args:
      flat: the step of the whole batch, calls flattened.
      consts: values of its constants.
      dims: for each of its inputs, the batch dims.
      num: how many contiguous blocks of equal size these are sharded in.
    """
    if num == 1 or not any(e.primitive.name == "sort" for e in _jaxpr.walk(flat)):  # type: ignore[arg-type]
        return flat
    opened = flat._replace(eqns=[_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns])
    region = Region(opened, [*consts])  # type: ignore[arg-type]
    rows = {var for (_, var), own in row_dims(region, dims).items() if own == {0}}
    rewritten = _Rewritten(rows, num)
    found: _rewrite.Flat = rewritten.of(region, {})
    return found if rewritten.num_sorts else flat


def _without_calls(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a loop, branch or checkpoint with the equations of its calls, unless these have constants."""
    flat, consts = _rewrite.flatten_calls(jaxpr, ())
    eqns = [_jaxpr.with_inner(eqn, _without_calls) for eqn in flat.eqns]
    return jaxpr if consts else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=flat.outvars)


class _Rewritten:
    """Rewrites each program by itself: the rows that one is given or returns are in their places."""

    def __init__(self, rows: set[Atom], num: int):
        self.rows, self.num, self.num_sorts = rows, num, 0

    def of(self, region: Region, given: dict[Atom, Fact]) -> Any:
        jaxpr, facts = region.jaxpr, self._facts(region.jaxpr, given)
        self.num_sorts += len(facts.sorts)
        writer = _BlocksWriter(facts)
        for eqn in jaxpr.eqns:
            inner = {id(each.jaxpr): each for each in region.inner(eqn)}
            passed = _passed(region, eqn, facts) if inner else {}

            def new(old: Jaxpr, inner: Any = inner, passed: Any = passed) -> Jaxpr:
                return self.of(inner[id(old)], passed) if id(old) in inner else old

            writer.write(_jaxpr.with_inner(eqn, new), facts.in_blocks.get(id(eqn)))
        assert not writer.constvars
        eqns, outs = writer.eqns, [*map(writer.read, jaxpr.outvars)]
        if isinstance(jaxpr, _rewrite.Flat):
            return jaxpr._replace(eqns=eqns, outvars=outs)
        same = [*map(id, eqns)] == [*map(id, jaxpr.eqns)]
        return jaxpr if same else _jaxpr.replaced(jaxpr, eqns=eqns, outvars=outs)

    def _facts(self, jaxpr: Jaxpr, given: dict[Atom, Fact]) -> _Facts:
        """With the orders of all sorts that no equation forbids."""
        kept = frozenset[int]()
        while True:
            facts = _Facts(self.rows, self.num, kept, given)
            try:
                facts.run(jaxpr)
            except OutOfOrderError as error:
                kept |= {facts.sorts[order] for order in error.orders}
            else:
                return facts


def _passed(region: Region, eqn: Eqn, facts: _Facts) -> dict[Atom, Fact]:
    """Facts of the operands that are the same values whenever a program inside runs."""
    ways = edges(region, eqn)
    changed = {edge.target for edge in ways if edge.kind is not EdgeKind.IN or edge.shift}
    found = {}
    for edge in ways:
        fact = facts.of(edge.source[1])
        if edge.target not in changed and not fact.orders and edge.kind is EdgeKind.IN:
            found[edge.target[1]] = fact._replace(root=None, counts=None, true_where=())
    return found


# -- facts ----------------------------------------------------------------------------------------------


class _Facts:
    """The facts of a jaxpr's values, in order of its equations.

    Attributes:
      sorts: the sorts whose orders there are, by the equation's id; not those `kept` as they are.
      in_blocks: the equations to be rewritten, by id, with the order of which they are.
    """

    def __init__(
        self, rows: set[Atom], num: int, kept: frozenset[int], given: dict[Atom, Fact]
    ):
        self.rows, self.num, self.kept = rows, num, kept
        self.sorts: dict[Order, int] = {}
        self.in_blocks: dict[int, Order] = {}
        self._facts = dict(given)

    def run(self, jaxpr: Jaxpr) -> None:
        """Raises OutOfOrderError: the sorts that must stay."""
        for eqn in jaxpr.eqns:
            rule = _RULES.get(eqn.primitive.name)
            ins = [*map(self.of, eqn.invars)]
            outs = None if rule is None else rule(self, eqn, ins)
            if outs is None:
                outs = self._alike(eqn, ins)
            self._facts |= zip(eqn.outvars, outs, strict=True)
        lost = [self.of(atom).orders for atom in jaxpr.outvars]
        if any(lost):
            raise OutOfOrderError(frozenset().union(*lost))

    def of(self, atom: Atom) -> Fact:
        if not _jaxpr.is_literal(atom):
            return self._facts.get(atom, NOTHING)
        value = np.asarray(_jaxpr.literal(atom)) if not atom.aval.shape else None
        known = value is not None and np.issubdtype(value.dtype, np.integer)
        return Fact(is_uniform=True, bounds=(int(value), int(value)) if known else None)

    def root(self, atom: Atom) -> Atom:
        return self.of(atom).root or atom

    def rewrite(self, eqn: Eqn, order: Order) -> None:
        self.in_blocks[id(eqn)] = order

    def divides(self, *sizes: int) -> bool:
        return all(size and size % self.num == 0 for size in sizes)

    def _alike(self, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact]:
        """Of an equation that treats the rows alike."""
        orders = frozenset[Order]().union(*(fact.orders for fact in ins))
        bounds = [_bounds(eqn, ins)] * len(eqn.outvars)
        uniform = _rules.is_elementwise(eqn) and all(fact.is_uniform for fact in ins)
        if not orders:
            return [Fact(bounds=own, is_uniform=uniform) for own in bounds]
        factor = _factor_of_rows(eqn, ins)
        if len(orders) > 1 or factor is None:
            raise OutOfOrderError(orders)
        (order,) = orders
        return [
            Fact(bounds=own) if dim is None else Fact(order, dim, bounds=own)
            for dim, own in zip(factor.outs, bounds, strict=True)
        ]


def _factor_of_rows(eqn: Eqn, ins: Sequence[Fact]) -> Factor | None:
    """The factor of the dim of rows; None if the equation does not treat them alike."""
    if any(fact.order is None and fact.orders for fact in ins) or _jaxpr.inner_jaxprs(eqn):
        return None
    for factor in _rules.factors_of(eqn):
        fits = all(
            own == (fact.dim if fact.order else None) or own is not None and fact.is_uniform
            for own, fact in zip(factor.ins, ins, strict=True)
        )
        reduced = all(dim is None for dim in factor.outs)
        if fits and not factor.groups and (factor.reduces is not None or not reduced):
            return factor
    return None


def _bounds(eqn: Eqn, ins: Sequence[Fact]) -> tuple[int, int] | None:
    """Of the result of an elementwise equation, as far as they are needed."""
    name, own = eqn.primitive.name, [fact.bounds for fact in ins]
    if name == "sign" and own[0] is not None:
        return int(np.sign(own[0][0])), int(np.sign(own[0][1]))
    if name == "select_n":
        own = own[1:]
    if name not in ("select_n", "max", "min") or not own or None in own:
        return None
    lows, highs = zip(*(x for x in own if x is not None), strict=True)
    if name == "max":
        return max(lows), max(highs)
    return min(lows), (min if name == "min" else max)(highs)


def _moved(
    facts: _Facts, eqn: Eqn, fact: Fact, dim: int | None, rows: int | None
) -> list[Fact] | None:
    """Of the same elements in another shape: where the ordered dim is, and the number of leading rows."""
    if fact.order is not None and dim is None:
        return None
    found = fact._replace(dim=dim or 0, true_where=())
    before = eqn.invars[0].aval.shape
    kept = rows is not None and before and (fact.order is not None or facts.divides(rows, before[0]))
    if not kept or fact.order is not None and (fact.dim, found.dim) != (0, 0):
        if fact.positions is not None and fact.positions.order is not None:
            return None
        found = found._replace(positions=None, is_permutation=False)
    if eqn.outvars[0].aval.size == eqn.invars[0].aval.size:
        return [found._replace(root=facts.root(eqn.invars[0]))]
    return [found._replace(root=None, counts=None, is_permutation=False)]


def _reshape(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.params.get("dimensions") is not None or len(ins) > 1:
        return None
    at = None
    if ins[0].order is not None:
        for olds, news in dim_groups(shape, new):
            large = [d for d in olds if shape[d] != 1], [e for e in news if new[e] != 1]
            if ins[0].dim in large[0] and len(large[0]) == len(large[1]) == 1:
                at = large[1][0]
    return _moved(facts, eqn, ins[0], at, new[0] if new else None)


def _broadcast(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (fact, *_), to, new = ins, eqn.params["broadcast_dimensions"], eqn.outvars[0].aval.shape
    if fact.is_uniform or not eqn.invars[0].aval.shape:
        return [Fact(is_uniform=True, bounds=fact.bounds)] if not fact.orders else None
    leads = bool(to) and to[0] == 0 and new[0] == eqn.invars[0].aval.shape[0]
    at = to[fact.dim] if fact.order is not None else None
    if at is not None and new[at] != eqn.invars[0].aval.shape[fact.dim]:
        return None
    return _moved(facts, eqn, fact, at, new[0] if leads else None)


def _cast(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (fact,), dtype = ins, np.dtype(eqn.outvars[0].aval.dtype)
    if fact.bounds is None or not np.issubdtype(dtype, np.integer):
        return None
    if not np.iinfo(dtype).min <= fact.bounds[0] <= fact.bounds[1] <= np.iinfo(dtype).max:
        return None
    return [fact._replace(root=facts.root(eqn.invars[0]))]


def _same(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact]:
    return [
        fact._replace(root=fact.root or (None if _jaxpr.is_literal(atom) else atom))
        for fact, atom in zip(ins, eqn.invars, strict=True)
    ]


def _iota(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape = eqn.outvars[0].aval.shape
    if eqn.params["dimension"] != 0 or not np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        return None
    positions = Positions(shape[0], None) if facts.divides(shape[0]) else None
    is_permutation = positions is not None and len(shape) == 1
    return [Fact(positions=positions, is_permutation=is_permutation, bounds=(0, shape[0] - 1))]


def _extremes(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """`max(x, 0)` of what is never below it."""
    for fact, other, atom in zip(ins, ins[::-1], eqn.invars, strict=True):
        if fact.bounds is None or other.bounds is None or not other.is_uniform:
            continue
        low, high = other.bounds
        stays = high <= fact.bounds[0] if eqn.primitive.name == "max" else low >= fact.bounds[1]
        if stays and atom.aval.shape == eqn.outvars[0].aval.shape:
            return [fact._replace(root=facts.root(atom))]
    return None


def _index_of_extreme(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    axes = eqn.params.get("axes", (eqn.params.get("axis"),))
    found = facts._alike(eqn, ins)
    size = eqn.invars[0].aval.shape[axes[0]]
    return [*found[:-1], found[-1]._replace(bounds=(0, size - 1))]


def _less(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    a, b = (fact.bounds for fact in ins)
    if a is None or b is None or a[0] < b[1]:
        return None
    return [Fact(true_where=("never",))]


def _not_equal(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    for fact, other in (ins, ins[::-1]):
        if fact.true_where[:1] == ("sign",) and other.bounds == (1, 1):
            return [Fact(fact.order, fact.dim, true_where=("zero", fact.true_where[1]))]
        if fact.true_where[:1] == ("rem",) and other.bounds == (0, 0):
            return [Fact(fact.order, fact.dim, true_where=("other", fact.true_where[1]))]
    return None


def _and(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    a, b = (fact.true_where for fact in ins)
    exclude = a[1:] == b[1:] != () and {a[0], b[0]} == {"zero", "other"}
    never = exclude or any(fact.is_never for fact in ins)
    return [Fact(true_where=("never",))] if never else None


def _sign(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (fact,) = ins
    if fact.bounds is None or fact.bounds[0] < 0 or fact.lost or fact.is_uniform:
        return None
    if fact.positions is not None and fact.positions.order is not None:
        return None
    return [Fact(fact.order, fact.dim, true_where=("sign", eqn.invars[0]))]


def _divisor(ins: Sequence[Fact]) -> int:
    """By which known number positions of the batch's rows are divided; 0 if they are not."""
    fact, by = ins
    if fact.positions is None or fact.positions.order is not None or not by.is_uniform:
        return 0
    least, most = by.bounds or (0, 0)
    return least if least == most > 0 else 0


def _rem(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if not _divisor(ins):
        return None
    bounds = 0, _divisor(ins) - 1
    return [Fact(ins[0].order, ins[0].dim, bounds=bounds, true_where=("rem", eqn.invars[0]))]


def _div(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    by, fact = _divisor(ins), ins[0]
    if not by or fact.positions is None or fact.positions.num % by:
        return None
    num = fact.positions.num // by
    if not facts.divides(num):
        return None
    return [Fact(fact.order, fact.dim, Positions(num, None), bounds=(0, num - 1))]


def _add(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """JAX adds the size to indices below 0, of which there are none among positions."""
    for fact, other in (ins, ins[::-1]):
        if fact.positions is not None and fact.positions.order is not None and other.is_uniform:
            return [Fact(fact.order, fact.dim, lost=fact.orders)]
    return None


def _select(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if not ins[0].is_never or len(ins) != 3:
        return None
    return [ins[1]._replace(root=facts.root(eqn.invars[1]))]


def _sort(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape, keys = eqn.invars[0].aval.shape, ins[0]
    stable = eqn.params["is_stable"] or eqn.params["num_keys"] == len(ins)
    if len(shape) != 1 or eqn.params["num_keys"] != 1 or not stable:
        return None
    if keys.order is not None:
        return _put_back(facts, eqn, ins)
    is_rows = not _jaxpr.is_literal(eqn.invars[0]) and eqn.invars[0] in facts.rows
    if any(fact.orders for fact in ins) or id(eqn) in facts.kept:
        return None
    if not is_rows or not facts.divides(shape[0]):
        return None
    low, high = keys.bounds or (-1, -1)
    order = Order((eqn.invars[0], eqn.outvars[0]), facts.root(eqn.invars[0]), None if low < 0 else high + 1)
    facts.sorts[order] = id(eqn)
    facts.rewrite(eqn, order)
    return [fact._replace(order=order, root=None, counts=None) for fact in ins]


def _put_back(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """A sort of the positions that another sort has moved: the rows are in their places again."""
    order, (keys, *others) = ins[0].order, ins
    num = eqn.invars[0].aval.shape[0]
    if not keys.is_permutation or keys.positions != Positions(num, None):
        return None
    outs = [Fact(positions=Positions(num, None), is_permutation=True, bounds=keys.bounds)]
    for fact in others:
        if fact.order is order:
            outs.append(fact._replace(order=None))
        elif not fact.orders and fact.is_permutation and fact.positions == Positions(num, None):
            outs.append(fact._replace(positions=Positions(num, order)))
        else:
            return None
    assert order is not None
    facts.rewrite(eqn, order)
    return outs


def _gather(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """A look-up of rows at positions: they come into the order of these."""
    (fact, at), positions = ins, ins[1].positions
    if positions is None or not at.orders or not _takes_rows(eqn):
        return None
    offsets = eqn.params["dimension_numbers"].offset_dims
    if eqn.invars[0].aval.shape[0] != positions.num or 0 in offsets:
        return None
    if not _is_in(fact, positions.order) or fact.is_uniform:
        return None
    order = positions.order or at.order
    assert order is not None
    facts.rewrite(eqn, order)
    return [fact._replace(order=at.order, dim=0, root=None, counts=None, is_permutation=False)]


def _scatter(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """An update of rows at positions: they come out of the order of these."""
    if (found := _histogram(facts, eqn, ins)) is not None:
        return found
    (fact, at, new), positions = ins, ins[1].positions
    adds = eqn.primitive.name == "scatter-add"
    if positions is None or not at.orders or not _puts_rows(eqn) or not (adds or at.is_permutation):
        return None
    windows = eqn.params["dimension_numbers"].update_window_dims
    if eqn.invars[0].aval.shape[0] != positions.num or 0 in windows:
        return None
    order = positions.order or at.order
    assert order is not None
    counted = new.is_permutation and not new.orders and new.positions == Positions(positions.num, None)
    inverse = counted and not adds and at.order is order and positions.order is None
    if not inverse and not _is_in(new, at.order) or not _is_in(fact, positions.order):
        return None
    facts.rewrite(eqn, order)
    if inverse:
        return [new._replace(positions=Positions(positions.num, order))]
    return [Fact(positions.order)]


def _is_in(fact: Fact, order: Order | None) -> bool:
    """Whether its leading rows are in this order; in any, if all elements are equal."""
    others = fact.orders - {order}
    return not others and (fact.is_uniform or fact.order is order and fact.dim == 0)


def _takes_rows(eqn: Eqn) -> bool:
    """Whether it is `x[indices]`, of rows that are in bounds."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    rows = numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
    whole = sizes == (1, *eqn.invars[0].aval.shape[1:])
    return rows and whole and not numbers.operand_batching_dims


def _puts_rows(eqn: Eqn) -> bool:
    """Whether it is `x.at[indices].add(new)` or `.set(new)`."""
    numbers = eqn.params["dimension_numbers"]
    rows = numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
    operand, at, new = eqn.invars
    whole = operand.aval.ndim - 1 + at.aval.ndim - 1 == new.aval.ndim
    windows = [new.aval.shape[d] for d in numbers.update_window_dims]
    return rows and whole and windows == [*operand.aval.shape[1:]] and not numbers.operand_batching_dims


def _histogram(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """`jnp.bincount`: ones added to zeros at each value; a histogram of what the indices are."""
    (zeros, at, ones), (operand, indices, _) = ins, eqn.invars
    if zeros.bounds != (0, 0) or ones.bounds != (1, 1) or operand.aval.ndim != 1:
        return None
    if eqn.primitive.name != "scatter-add" or not _puts_rows(eqn) or at.bounds is None:
        return None
    inside = at.bounds[1] < operand.aval.shape[0]
    drops = eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    if at.bounds[0] < 0 or not inside and not drops or at.lost or at.orders:
        return None
    return [Fact(counts=facts.root(indices))]


def _ragged_dot(facts: _Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """The rows of each group by its matrix; or, in a backward pass, its rows by its rows."""
    order, (lhs, rhs, sizes) = ins[0].order, ins[:3]
    if order is None or order.num_values is None or len(ins) != 3 or sizes.orders:
        return None
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), batch = numbers.dot_dimension_numbers
    if any(batch) or lhs != Fact(order, lhs.dim) or [*numbers.lhs_ragged_dimensions] != [lhs.dim]:
        return None
    if eqn.params.get("group_offset") is not None:
        return None
    if lhs.dim not in lhs_sum:
        if rhs.orders or lhs.dim != 0:
            return None
        facts.rewrite(eqn, order)
        return [Fact(order)]
    other = rhs_sum[[*lhs_sum].index(lhs.dim)]
    if rhs != Fact(order, rhs.dim) or other != rhs.dim:
        return None
    facts.rewrite(eqn, order)
    return [NOTHING]


_RULES = {
    "reshape": _reshape, "broadcast_in_dim": _broadcast, "convert_element_type": _cast, "iota": _iota,
    "max": _extremes, "min": _extremes, "top_k": _index_of_extreme, "argmax": _index_of_extreme,
    "argmin": _index_of_extreme, "lt": _less, "ne": _not_equal, "and": _and, "sign": _sign, "rem": _rem,
    "div": _div, "add": _add, "select_n": _select, "sort": _sort, "gather": _gather, "scatter": _scatter,
    "scatter-add": _scatter, "ragged_dot_general": _ragged_dot,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "optimization_barrier", "name"), _same),
}  # fmt: skip


# -- the rewritten equations ------------------------------------------------------------------------------


class _BlocksWriter(JaxprWriter):
    """Writes the equations of sorted rows for each block by itself: `[rows, ...]` as `[num, rows, ...]`."""

    def __init__(self, facts: _Facts):
        super().__init__(None)  # type: ignore[arg-type]
        self._facts, self._num = facts, facts.num
        self._sizes: dict[tuple[Order, Atom], Atom] = {}

    def write(self, eqn: Eqn, order: Order | None) -> None:
        self.source, params = eqn, eqn.params
        if order is None:
            self.eqns.append(self.renamed(eqn))
            return
        ins = [*map(self.read, eqn.invars)]
        if eqn.primitive.name == "sort":
            outs = self.trace(_sorted, *ins, static=(self._num, params["num_keys"], params["is_stable"]))
        elif eqn.primitive.name == "gather":
            static = self._num, params["dimension_numbers"], params["slice_sizes"]
            outs = self.trace(_taken, *ins, static=static)
        elif eqn.primitive.name == "ragged_dot_general":
            ins[2] = self._sizes_of_blocks(order, eqn.invars[2])
            dims = self._facts.of(eqn.invars[0]).dim, self._facts.of(eqn.invars[1]).order and self._facts.of(eqn.invars[1]).dim
            options = params["precision"], params["preferred_element_type"]
            numbers = params["ragged_dot_dimension_numbers"]
            outs = self.trace(_multiplied, *ins, static=(self._num, numbers, dims, options))
        else:
            adds = eqn.primitive.name == "scatter-add"
            outs = self.trace(_updated, *ins, static=(self._num, params["dimension_numbers"], adds))
        self.names |= zip(eqn.outvars, outs, strict=True)

    def _sizes_of_blocks(self, order: Order, sizes: Atom) -> Atom:
        """`[num, groups]`: how many rows of each block are in each group."""
        if (order, sizes) not in self._sizes:
            keys, fact = self.read(order.keys[0]), self._facts.of(sizes)
            if fact.counts is order.root:
                found = self.trace(_counted, keys, static=(self._num, sizes.aval.shape[0], sizes.aval.dtype))
            else:
                found = self.trace(_shared_out, keys, self.read(sizes), static=(self._num, order.num_values))
            self._sizes[order, sizes] = found[0]
        return self._sizes[order, sizes]


def _in_blocks(num: int, x: jax.Array, dim: int = 0) -> jax.Array:
    """Blocks of a dim, in front."""
    shape = x.shape
    blocks = x.reshape(*shape[:dim], num, shape[dim] // num, *shape[dim + 1 :])
    return jnp.moveaxis(blocks, dim, 0) if dim else blocks


def _sorted(num: int, num_keys: int, is_stable: bool, *xs: jax.Array) -> tuple[jax.Array, ...]:
    blocks = [_in_blocks(num, x) for x in xs]
    outs = lax.sort(blocks, dimension=1, num_keys=num_keys, is_stable=is_stable)
    return tuple(out.reshape(x.shape) for out, x in zip(outs, xs, strict=True))


def _within(num: int, rows: int, at: jax.Array) -> jax.Array:
    """Positions of rows within their blocks."""
    blocks = _in_blocks(num, at)
    first = lax.broadcasted_iota(at.dtype, blocks.shape, 0) * jnp.asarray(rows // num, at.dtype)
    return blocks - first


def _taken(
    num: int, numbers: Any, sizes: tuple[int, ...], x: jax.Array, at: jax.Array
) -> jax.Array:
    def take(rows: jax.Array, own: jax.Array) -> jax.Array:
        return lax.gather(rows, own, numbers, sizes, mode=IN_BOUNDS)

    found = jax.vmap(take)(_in_blocks(num, x), _within(num, x.shape[0], at))
    return found.reshape(at.shape[0], *found.shape[2:])


def _updated(
    num: int, numbers: Any, adds: bool, x: jax.Array, at: jax.Array, new: jax.Array
) -> jax.Array:
    def update(rows: jax.Array, own: jax.Array, more: jax.Array) -> jax.Array:
        return (lax.scatter_add if adds else lax.scatter)(rows, own, more, numbers, mode=IN_BOUNDS)

    blocks = _in_blocks(num, x), _within(num, x.shape[0], at), _in_blocks(num, new)
    return jax.vmap(update)(*blocks).reshape(x.shape)


def _multiplied(
    num: int, numbers: lax.RaggedDotDimensionNumbers, dims: tuple[int, int | None], options: Any,
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array,
) -> jax.Array:  # fmt: skip
    precision, dtype = options

    def multiply(a: jax.Array, b: jax.Array, own: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(a, b, own, numbers, precision, dtype)

    a = _in_blocks(num, lhs, dims[0])
    if dims[1] is not None:  # Each block has a part of the sum over rows.
        return jax.vmap(multiply)(a, _in_blocks(num, rhs, dims[1]), sizes).sum(0)
    same = lax.broadcast_in_dim(rhs, (num, *rhs.shape), tuple(range(1, rhs.ndim + 1)))
    found = jax.vmap(multiply)(a, same, sizes)
    return found.reshape(lhs.shape[0], *found.shape[2:])


def _counted(num: int, size: int, dtype: Any, keys: jax.Array) -> jax.Array:
    """`[num, size]`: how often each block has each key."""

    def count(own: jax.Array) -> jax.Array:
        return jnp.zeros(size, dtype).at[own].add(1, mode="drop")

    return jax.vmap(count)(_in_blocks(num, keys))


def _shared_out(num: int, num_values: int, keys: jax.Array, sizes: jax.Array) -> jax.Array:
    """How many rows of each block are in each group, where groups are of `sizes` rows of all blocks.

    In the order of all rows those of a block with one key are a range; so are the rows of a group.
    """
    own = _counted(num, num_values, sizes.dtype, keys)
    before = jnp.cumsum(own, axis=0) - own
    total = own.sum(0)
    start = (jnp.cumsum(total) - total + before)[:, :, None]
    end, last = start + own[:, :, None], jnp.cumsum(sizes)
    common = jnp.minimum(end, last) - jnp.maximum(start, last - sizes)
    return jnp.maximum(common, 0).sum(1).astype(sizes.dtype)
