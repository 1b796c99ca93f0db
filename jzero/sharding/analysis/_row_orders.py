# SPDX-License-Identifier: Apache-2.0
"""Finds sorts of rows that each device can do for its own rows only.

A mixture of experts without dropped tokens sorts the rows of the whole batch by expert, multiplies each
expert's rows by its matrices (`lax.ragged_dot`) and puts the results back::

    order = argsort(expert)                      # of all rows
    y = ragged_dot(x[order // k], w, bincount(expert))
    y = y[argsort(order)]                        # or zeros.at[order // k].add(y)

Nothing after the last line depends on the order in between. So each of `num` equal blocks of rows (a
device's, or one of its microbatches') can be sorted by itself: the step computes the same, up to the order of
sums.

[Note: orders of rows] A value is *in order* of a sort if its rows are permuted like the sort's results. A
`Fact` records that for a value, and which integers are positions of rows of the same block. An equation that
treats rows alike has results in order, by its factor of the dim (`ir/_rules.py`). Look-ups and updates at
positions take rows into an order and out of it. Any other reader of a value in order needs the rows of the
whole batch in their places, and so does a result of the step: then the sort stays as it is.

[Note: orders across programs] Values in order enter `jax.checkpoint` bodies, and pass from one scan to
another as residuals: in a stack, of which each slice has its own order. `Fact.slices` of the stack records
what is known of a slice, and a scan that slices the stack gets it back. Orders and roots are renamed on the
way, because one scan may see slices of several iterations of another.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import Factor
from jzero.ir._layout import dim_groups
from jzero.ir._regions import Edge, EdgeKind, Region, edges
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn

# Identifies a value: its region and variable; or what a scan stacks, or slices, of another.
Name: TypeAlias = Hashable
EqnIn: TypeAlias = tuple[Region, int]  # An equation by its id.


@dataclasses.dataclass(eq=False)
class Order:
    """The order of rows that a sort makes; or the orders of a stack's slices; or that of one slice."""

    region: Region
    root: Name  # The value whose elements, times `number`, are the first keys (plus less than `number`).
    num_values: int | None  # The root's elements are from 0 to below it; None if that is unknown.
    number: int
    by_place: bool  # Rows of equal first keys stay in the order of the batch.
    sorts: set[EqnIn]  # The equations that make it.
    of: Order | None = None  # For a stack, the order of a slice; for a slice, those of its stack.
    body: Region | None = None  # For a stack, the body of the scan that makes it.


MOST_VALUES = 4096  # Keys with more values are not counted.


class Positions(NamedTuple):
    """Integers that are positions of rows of the same block, among `num` rows in an order or as given."""

    num: int
    order: Order | None


class Fact(NamedTuple):
    order: Order | None = None  # Of its rows; None for the batch's.
    dim: int = 0  # The dim of rows, if it is in order.
    positions: Positions | None = None  # The rows whose positions its elements are.
    has_all: bool = False  # These are all rows, each once; 0, 1, 2, ... if neither is in an order.
    bounds: tuple[int, int] | None = None  # Least and largest element of integers.
    root: Name | None = None  # The value whose elements it has, permuted by its order.
    counts: Name | None = None  # The value of which it is a histogram of 0, 1, ...
    is_uniform: bool = False  # All elements are equal.
    # ("sign", x) or ("rem", x). ("put", x, at): x put at positions; ("same", x): taken from there again.
    # Booleans that are true at most where x is zero, ("zero", x), or where it is not, ("other", x).
    # ("count",): 0, 1, ... along the last dim alone. ("one hot", x): where x equals that.
    # ("total", n): integers whose sum is n. ("times", root, number, keys): a root of `keys` values times a
    # number. ("packed", root, number, keys, rows): that plus positions of `rows` rows, at most the number.
    made_of: tuple[Any, ...] = ()
    # Orders from whose positions it was computed in other ways, so that blocks would have other numbers.
    lost: frozenset[Order] = frozenset()
    slices: Fact | None = None  # For a stack of a scan, what is known of each slice along dim 0.

    @property
    def orders(self) -> frozenset[Order]:
        """The orders on which its elements, or their places, depend."""
        own = self.order, self.positions and self.positions.order
        found = self.lost.union(x for x in own if x is not None)
        return found if self.slices is None else found | self.slices.orders

    @property
    def constant(self) -> int | None:
        """The number to which all elements are equal."""
        low, high = self.bounds or (0, 1)
        return low if low == high else None

    def renamed(self, order: Callable[[Order], Order], name: Callable[[Name], Name]) -> Fact:
        def new(old: Any, change: Callable[[Any], Any]) -> Any:
            return None if old is None else change(old)

        at = self.positions
        return self._replace(
            order=new(self.order, order), root=new(self.root, name), counts=new(self.counts, name),
            positions=at and Positions(at.num, new(at.order, order)),
            lost=frozenset(map(order, self.lost)), made_of=self.made_of if len(self.made_of) == 1 else (),
            slices=new(self.slices, lambda slices: slices.renamed(order, name)),
        )  # fmt: skip


NOTHING = Fact()
NEVER, ALWAYS = (Fact(bounds=(case, case), is_uniform=True) for case in (0, 1))  # Booleans.


class OutOfOrderError(Exception):
    """An equation needs rows in their places."""

    def __init__(self, orders: frozenset[Order]):
        super().__init__()
        self.orders = orders


class Facts:
    """Finds the facts of a step's values, in order of its equations, which are in `region`.

    The facts hold only without the sorts in `blamed`. `in_blocks` has the equations to rewrite, with their
    orders.
    """

    def __init__(self, rows: set[tuple[Region, Atom]], num: int, kept: frozenset[EqnIn]):
        self.rows, self.num, self.kept = rows, num, kept
        self.blamed: set[EqnIn] = set()
        self.in_blocks: dict[EqnIn, Order] = {}
        self._facts: dict[tuple[Region, Atom], Fact] = {}
        self._orders: dict[Hashable, Order] = {}

    def run(self, region: Region) -> None:
        for eqn in region.jaxpr.eqns:
            self.region = region
            try:
                outs = self._through(eqn, [*map(self.of, eqn.invars)])
            except OutOfOrderError as error:
                self.blame(error.orders)
                outs = [NOTHING] * len(eqn.outvars)
            self._facts |= zip(((region, var) for var in eqn.outvars), outs, strict=True)
        self.region = region

    def blame(self, orders: frozenset[Order]) -> None:
        self.blamed.update(*(order.sorts for order in orders))

    def of(self, atom: Atom) -> Fact:
        if not _jaxpr.is_literal(atom):
            return self._facts.get((self.region, atom), NOTHING)
        value = np.asarray(_jaxpr.literal(atom))
        known = value.ndim == 0 and value.dtype.kind in "biu"
        return Fact(is_uniform=value.ndim == 0, bounds=(int(value), int(value)) if known else None)

    def root(self, atom: Atom) -> Name:
        return self.of(atom).root or (self.region, id(atom))

    def rewrite(self, eqn: Eqn, order: Order) -> None:
        self.in_blocks[self.region, id(eqn)] = order

    def divides(self, *sizes: int) -> bool:
        return all(size and size % self.num == 0 for size in sizes)

    def order(self, key: Hashable, make: Callable[[], Order]) -> Order:
        """The order of a key, made once."""
        if key not in self._orders:
            self._orders[key] = make()
        return self._orders[key]

    def stack(self, body: Region, order: Order) -> Order:
        """The orders of the slices of a stack that a scan makes."""
        assert body.around is not None
        return self._of_scan("stack", body, order, body.around[0])

    def slice(self, body: Region, order: Order) -> Order:
        """The order of a slice of a stack with these orders."""
        return self._of_scan("slice", body, order, body)

    def _of_scan(self, kind: str, scan: Region, order: Order, region: Region) -> Order:
        body, root = None if region is scan else scan, (kind, scan, order.root)
        return self.order(
            (kind, scan, order),
            lambda: dataclasses.replace(order, region=region, root=root, of=order, body=body),
        )

    def _through(self, eqn: Eqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        if self.region.inner(eqn):
            return self._inside(eqn, ins)
        rule = _RULES.get(eqn.primitive.name)
        if any(fact.slices is not None for fact in ins) and rule is not _same:
            if orders := _all_orders(ins):
                raise OutOfOrderError(orders)
            ins = [fact._replace(slices=None) for fact in ins]
        outs = None if rule is None else rule(self, eqn, ins)
        return self._alike(eqn, ins) if outs is None else outs

    def _inside(self, eqn: Eqn, ins: Sequence[Fact]) -> Sequence[Fact]:
        found: dict[Atom, Fact] = dict.fromkeys(eqn.outvars, NOTHING)
        region, inner, orders = self.region, self.region.inner(eqn), _all_orders(ins)
        if not orders and not any(has_sort(each.jaxpr) for each in inner):
            return [*found.values()]
        name, ways = eqn.primitive.name, edges(region, eqn)
        if orders and name not in ("scan", "remat2"):
            raise OutOfOrderError(orders)
        carried = {edge.target for edge in ways if edge.kind is EdgeKind.BACK}
        for edge in ways:
            if edge.kind is EdgeKind.IN:
                self._facts[edge.target] = self._across(edge, edge.target not in carried)
        for each in inner:
            self.run(each)
        for edge in ways:
            if edge.kind is EdgeKind.OUT:
                passes = edge.shift > 0 or name == "remat2"
                found[edge.target[1]] = self._across(edge, passes)
            elif edge.kind is not EdgeKind.IN:
                self._across(edge, False)
        return [found[var] for var in eqn.outvars]

    def _across(self, edge: Edge, passes: bool) -> Fact:
        """The fact at the target of an edge; blames its orders if the edge does not pass them."""
        self.region, atom = edge.source
        fact = self.of(atom)._replace(root=self.root(atom))
        if passes and not edge.shift:
            return fact.renamed(lambda order: order, lambda name: name)
        if passes and edge.shift > 0:
            stack, body = functools.partial(self.stack, self.region), self.region
            return Fact(slices=fact.renamed(stack, lambda name: ("stack", body, name)))
        if passes and fact.slices is not None:
            slice_of, body = functools.partial(self.slice, edge.target[0]), edge.target[0]
            return fact.slices.renamed(slice_of, lambda name: ("slice", body, name))
        self.blame(fact.orders)
        return NOTHING

    def _alike(self, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact]:
        """The facts of an equation that treats rows alike; an error if it does not."""
        orders = _all_orders(ins)
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


def _all_orders(facts: Sequence[Fact]) -> frozenset[Order]:
    return frozenset().union(*(fact.orders for fact in facts))


def _factor_of_rows(eqn: Eqn, ins: Sequence[Fact]) -> Factor | None:
    """The factor of the batch dim; None if the equation does not treat rows alike."""
    if any(fact.order is None and fact.orders for fact in ins):
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
    """The bounds of an elementwise equation's result, for the equations of `_BOUNDS`."""
    name, found = eqn.primitive.name, [fact.bounds for fact in ins]
    own = [bounds for bounds in (found[1:] if name == "select_n" else found) if bounds is not None]
    if name not in _BOUNDS or len(own) < len(found) - (name == "select_n"):
        return None
    lows, highs = zip(*own, strict=True)
    low, high = _BOUNDS[name]
    result = int(low(lows)), int(high(highs))
    return result if _holds(eqn.outvars[0].aval.dtype, result) else None


def _holds(dtype: Any, bounds: tuple[int, int]) -> bool:
    """Whether a dtype of integers or booleans has all numbers between bounds."""
    types = (0, 1) if dtype == np.bool_ else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return types[0] <= bounds[0] <= bounds[1] <= types[1]


_BOUNDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add": (sum, sum), "max": (max, max), "min": (min, min), "select_n": (min, max),
    "sign": (lambda x: np.sign(x[0]), lambda x: np.sign(x[0])),
}  # fmt: skip


def _reshape(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape, new, fact = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, ins[0]
    if len(ins) > 1 or eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
        return None
    if fact.order is None:
        stays = shape != () != new and facts.divides(shape[0], new[0])
        return _with_dim(facts, eqn, fact, 0, stays)
    for olds, news in dim_groups(shape, new):
        large = [d for d in olds if shape[d] != 1], [d for d in news if new[d] != 1]
        if large[0] == [fact.dim] and len(large[1]) == 1:
            return _with_dim(facts, eqn, fact, large[1][0], fact.dim == large[1][0] == 0)
    return None


def _broadcast(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    fact, to, shape = ins[0], eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
    if fact.is_uniform or not shape:
        return None if fact.orders else [Fact(is_uniform=True, bounds=fact.bounds)]
    new = eqn.outvars[0].aval.shape
    if fact.made_of == ("count",) and _is_line(new) and new[-1] == shape[-1]:
        return [Fact(bounds=fact.bounds, made_of=fact.made_of)]
    if new[to[fact.dim]] != shape[fact.dim]:
        return None
    return _with_dim(facts, eqn, fact, to[fact.dim], fact.dim == to[fact.dim] == 0)


def _with_dim(facts: Facts, eqn: Eqn, fact: Fact, dim: int, rows_lead: bool) -> list[Fact] | None:
    """The fact in another shape, with rows along `dim`, or with positions of blocks of rows along dim 0."""
    found = fact._replace(dim=0 if fact.order is None else dim, made_of=(), counts=None)
    if not rows_lead:
        if fact.positions is not None and fact.positions.order is not None:
            return None
        found = found._replace(positions=None)
    if eqn.outvars[0].aval.size == eqn.invars[0].aval.size:
        return [found._replace(root=facts.root(eqn.invars[0]))]
    return [found._replace(root=None, has_all=False)]


def _cast(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (fact,), dtype = ins, np.dtype(eqn.outvars[0].aval.dtype)
    if eqn.invars[0].aval.dtype == np.bool_ and fact.bounds is None:
        fact = fact._replace(bounds=(0, 1))
    if fact.bounds is None or not np.issubdtype(dtype, np.integer):
        return None
    if not _holds(dtype, fact.bounds):
        return None
    return _same(facts, eqn, [fact])


def _same(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact]:
    return [
        fact._replace(root=facts.root(atom)) for fact, atom in zip(ins, eqn.invars, strict=True)
    ]


def _iota(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape, dim = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    if not np.issubdtype(eqn.outvars[0].aval.dtype, np.integer):
        return None
    leads = dim == 0 and facts.divides(shape[0])
    positions = Positions(shape[0], None) if leads else None
    found = Fact(positions=positions, has_all=leads and len(shape) == 1, bounds=(0, shape[dim] - 1))
    return [found._replace(made_of=("count",)) if _is_line(shape) else found]


def _is_line(shape: Sequence[int]) -> bool:
    return all(n == 1 for n in shape[:-1])


def _extremes(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """`max(x, 0)` is x if x is never negative."""
    for fact, other, atom in zip(ins, ins[::-1], eqn.invars, strict=True):
        if fact.bounds is None or other.bounds is None or not other.is_uniform:
            continue
        low, high = other.bounds
        stays = high <= fact.bounds[0] if eqn.primitive.name == "max" else low >= fact.bounds[1]
        if stays and atom.aval.shape == eqn.outvars[0].aval.shape:
            return [fact._replace(root=facts.root(atom))]
    return None


def _index_of_extreme(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    axes = eqn.params.get("axes", (eqn.params.get("axis"),))
    found, most = facts._alike(eqn, ins), eqn.invars[0].aval.shape[axes[0]] - 1
    fits = most <= np.iinfo(eqn.outvars[-1].aval.dtype).max
    return [*found[:-1], found[-1]._replace(bounds=(0, most) if fits else None)]


def _less(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    a, b = (fact.bounds for fact in ins)
    if a is None or b is None:
        return None
    return [NEVER] if a[0] >= b[1] else [ALWAYS] if a[1] < b[0] else None


def _not_equal(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if ins[0].constant is not None and ins[0].constant == ins[1].constant:
        return [NEVER]
    for fact, other in (ins, ins[::-1]):
        if fact.made_of[:1] == ("sign",) and other.bounds == (1, 1):
            return [Fact(fact.order, fact.dim, made_of=("zero", fact.made_of[1]))]
        if fact.made_of[:1] == ("rem",) and other.bounds == (0, 0):
            return [Fact(fact.order, fact.dim, made_of=("other", fact.made_of[1]))]
    return None


def _and(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    a, b = (fact.made_of for fact in ins)
    exclude = a[1:] == b[1:] != () and {a[0], b[0]} == {"zero", "other"}
    return [NEVER] if exclude or any(fact.constant == 0 for fact in ins) else None


def _sign(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (fact,) = ins
    if fact.bounds is None or fact.bounds[0] < 0 or fact.lost or fact.is_uniform:
        return None
    if fact.positions is not None and fact.positions.order is not None:
        return None
    return [Fact(fact.order, fact.dim, made_of=("sign", eqn.invars[0]))]


def _divisor(eqn: Eqn, ins: Sequence[Fact]) -> int:
    """The known number by which positions of the batch's rows are divided; 0 if there is none."""
    fact, by = ins
    if fact.positions is None or fact.positions.order is not None or not by.is_uniform:
        return 0
    least, most = by.bounds or (0, 0)
    if eqn.primitive.name.startswith("shift_right"):
        return 2**least if 0 <= least == most < 31 else 0
    return least if least == most > 0 else 0


def _mul(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    for fact, num, atom in zip(ins, (ins[1].constant, ins[0].constant), eqn.invars, strict=True):
        low, high = fact.bounds or (-1, -1)
        if low < 0 or num is None or num < 1 or fact.is_uniform or _all_orders(ins):
            continue
        bounds, out = (low * num, high * num), eqn.outvars[0].aval
        if atom.aval.shape == out.shape and _holds(out.dtype, bounds):
            return [Fact(bounds=bounds, made_of=("times", facts.root(atom), num, high + 1))]
    return None


def _unpacked(ins: Sequence[Fact]) -> tuple[Any, ...] | None:
    """Root, keys and rows of a packed value that is divided by its number."""
    made_of = ins[0].made_of
    if made_of[:1] != ("packed",) or ins[1].constant != made_of[2]:
        return None
    return made_of[1], *made_of[3:]


def _rem(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    if (found := _unpacked(ins)) is not None:
        own, num = ("rem", eqn.invars[0]), found[2]
        at = Positions(num, None)
        return [Fact(ins[0].order, ins[0].dim, at, True, (0, num - 1), made_of=own)]
    if not _divisor(eqn, ins):
        return None
    bounds = 0, _divisor(eqn, ins) - 1
    return [Fact(ins[0].order, ins[0].dim, bounds=bounds, made_of=("rem", eqn.invars[0]))]


def _div(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    by, fact = _divisor(eqn, ins), ins[0]
    if (found := _unpacked(ins)) is not None and eqn.primitive.name == "div":
        return [Fact(fact.order, fact.dim, bounds=(0, found[1] - 1), root=found[0])]
    if not by or fact.positions is None or fact.positions.num % by:
        return None
    num = fact.positions.num // by
    if not facts.divides(num):
        return None
    return [Fact(fact.order, fact.dim, Positions(num, None), bounds=(0, num - 1))]


def _add(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    for fact, other in (ins, ins[::-1]):
        at, bounds = other.positions, _bounds(eqn, ins)
        if fact.made_of[:1] == ("times",) and at is not None and _counts(other, at.num) and bounds:
            if at.num <= fact.made_of[2]:
                return [Fact(bounds=bounds, made_of=("packed", *fact.made_of[1:], at.num))]
        # JAX indexes with `where(i < 0, i + n, i)`: positions are not negative, so `_select` drops this.
        if fact.positions is not None and fact.positions.order is not None and other.is_uniform:
            return [Fact(fact.order, fact.dim, lost=fact.orders)]
    return None


def _select(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    case = ins[0].constant
    if case is None or not 0 <= case < len(ins) - 1:
        return None
    return [ins[1 + case]._replace(root=facts.root(eqn.invars[1 + case]))]


def _equal(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    for fact, other, atom in zip(ins, ins[::-1], eqn.invars, strict=True):
        if fact.made_of[:1] == ("same",) and any(x is fact.made_of[1] for x in eqn.invars):
            return [ALWAYS]
        if other.made_of == ("count",) and atom.aval.shape[-1:] == (1,) and not fact.lost:
            (found,) = facts._alike(eqn, ins)
            return [found._replace(made_of=("one hot", facts.root(atom)))]
    a, b = (fact.bounds for fact in ins)
    if a is None or b is None or a[0] <= b[1] and b[0] <= a[1]:
        return None
    return [NEVER]


def _reduce_sum(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    (found,), fact, axes = facts._alike(eqn, ins), ins[0], eqn.params["axes"]
    if fact.bounds is None or fact.lost:
        return None
    shape, dtype = eqn.invars[0].aval.shape, eqn.outvars[0].aval.dtype
    num = math.prod(shape[d] for d in axes)
    low, high = (bound * num for bound in fact.bounds)
    if fact.made_of[:1] == ("total",) and len(axes) == len(shape):
        low = high = fact.made_of[1]
    if not _holds(dtype, (low, high)):
        return None
    is_histogram = fact.made_of[:1] == ("one hot",) and sorted(axes) == [*range(len(shape) - 1)]
    return [found._replace(bounds=(low, high), counts=fact.made_of[1] if is_histogram else None)]


def _sort(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    shape, (keys, *others) = eqn.invars[0].aval.shape, ins
    if len(shape) != 1:
        return None
    if keys.order is not None:
        return _put_back(facts, eqn, ins)
    if keys.positions is not None and keys.positions.order is not None:
        return _in_its_order(facts, eqn, ins)
    region, here = facts.region, (facts.region, id(eqn))
    is_rows = (region, eqn.invars[0]) in facts.rows and facts.divides(shape[0])
    if _all_orders(ins) or here in facts.kept or not is_rows:
        return None
    root, number, (low, high) = facts.root(eqn.invars[0]), 1, keys.bounds or (-1, -1)
    if eqn.params["num_keys"] > 1:
        by_place = _counts(others[0], shape[0])
    else:
        by_place = eqn.params["is_stable"] or not others
    if is_packed := keys.made_of[:1] == ("packed",):
        _, root, number, num_values, _ = keys.made_of
        low, high, by_place = 0, num_values - 1, True
    num_values, sorts = high + 1 if low >= 0 and high < MOST_VALUES else None, set[EqnIn]()
    # If equal keys stay in the order of the batch, all sorts by the same root have the same order.
    order = facts.order(
        ("sort", region, root if by_place else id(eqn)),
        lambda: Order(region, root, num_values, number, by_place, sorts),
    )
    order.sorts.add(here)
    facts.rewrite(eqn, order)
    found = [fact._replace(order=order, made_of=()) for fact in _same(facts, eqn, ins)]
    return [found[0]._replace(made_of=keys.made_of if is_packed else ()), *found[1:]]


def _counts(fact: Fact, num: int) -> bool:
    """Whether it is 0, 1, 2, ..., `num - 1`."""
    return not fact.orders and fact.has_all and fact.positions == Positions(num, None)


def _in_its_order(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """A sort by the rows' positions in an order brings all operands into this order."""
    (keys, *others), num = ins, eqn.invars[0].aval.shape[0]
    order = keys.positions and keys.positions.order
    if not keys.has_all or keys.positions != Positions(num, order) or keys.orders != {order}:
        return None
    if any(fact.orders for fact in others):
        return None
    assert order is not None
    facts.rewrite(eqn, order)
    places = Fact(positions=Positions(num, None), has_all=True, bounds=keys.bounds)
    moved = [fact._replace(order=order, made_of=()) for fact in _same(facts, eqn, ins)]
    return [places, *moved[1:]]


def _put_back(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """A sort by positions that another sort has permuted puts the rows back in their places."""
    order, (keys, *others) = ins[0].order, ins
    num = eqn.invars[0].aval.shape[0]
    if not keys.has_all or keys.positions != Positions(num, None):
        return None
    outs = [Fact(positions=Positions(num, None), has_all=True, bounds=keys.bounds)]
    for fact in others:
        if fact.order is order:
            outs.append(fact._replace(order=None, made_of=()))
        elif _counts(fact, num):
            outs.append(fact._replace(positions=Positions(num, order), root=None))
        else:
            return None
    assert order is not None
    facts.rewrite(eqn, order)
    return outs


def _gather(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """A look-up of rows at positions brings them into the order of these."""
    (fact, at), positions = ins, ins[1].positions
    if positions is None or not at.orders or not _takes_rows(eqn):
        return None
    if fact.made_of[:1] == ("put",) and fact.made_of[2] is eqn.invars[1] and at.order is not None:
        facts.rewrite(eqn, at.order)
        return [Fact(lost=fact.lost, made_of=("same", fact.made_of[1]))]
    offsets = eqn.params["dimension_numbers"].offset_dims
    if eqn.invars[0].aval.shape[0] != positions.num or 0 in offsets:
        return None
    if not _is_in(fact, positions.order) or fact.is_uniform:
        return None
    order = positions.order or at.order
    assert order is not None
    facts.rewrite(eqn, order)
    return [Fact(at.order, positions=fact.positions, bounds=fact.bounds)]


def _scatter(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """An update of rows at positions takes them out of the order of these."""
    if (found := _histogram(facts, eqn, ins)) is not None:
        return found
    (fact, at, new), positions = ins, ins[1].positions
    adds = eqn.primitive.name == "scatter-add"
    if positions is None or not at.orders or not _puts_rows(eqn) or not (adds or at.has_all):
        return None
    windows = eqn.params["dimension_numbers"].update_window_dims
    if eqn.invars[0].aval.shape[0] != positions.num or 0 in windows:
        return None
    order = positions.order or at.order
    assert order is not None
    inverse = _counts(new, positions.num) and not adds
    inverse &= at.order is order and positions.order is None
    if not _is_in(fact, positions.order):
        return None
    if not inverse and not _is_in(new, at.order):
        if adds or new.orders or positions.order is not None:
            return None
        # For a derivative, JAX puts numbers at indices, to see which ones are not overwritten.
        facts.rewrite(eqn, order)
        put = "put", eqn.invars[2], eqn.invars[1]
        return [Fact(lost=frozenset({order}), bounds=new.bounds, made_of=put)]
    facts.rewrite(eqn, order)
    if inverse:
        return [new._replace(positions=Positions(positions.num, order), root=None)]
    return [Fact(positions.order)]


def _is_in(fact: Fact, order: Order | None) -> bool:
    """Whether its rows lead and are in this order, or all elements are equal."""
    others = fact.orders - {order}
    return not others and (fact.is_uniform or fact.order is order and fact.dim == 0)


def _takes_rows(eqn: Eqn) -> bool:
    """Whether it is `x[indices]` of whole rows."""
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
    return (
        rows
        and whole
        and windows == [*operand.aval.shape[1:]]
        and not numbers.operand_batching_dims
    )


def _histogram(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """`jnp.bincount`: ones added to zeros at each index make a histogram of the indices."""
    (zeros, at, ones), (operand, indices, _) = ins, eqn.invars
    if zeros.bounds != (0, 0) or ones.bounds != (1, 1) or operand.aval.ndim != 1:
        return None
    if eqn.primitive.name != "scatter-add" or not _puts_rows(eqn) or at.bounds is None:
        return None
    inside = at.bounds[1] < operand.aval.shape[0]
    drops = eqn.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP
    if at.bounds[0] < 0 or not inside and not drops or at.lost:
        return None
    most = indices.aval.size
    if not _holds(operand.aval.dtype, (0, most)):
        return None
    made_of = ("total", most) if inside else ()
    return [Fact(counts=facts.root(indices), bounds=(0, most), made_of=made_of)]


def _ragged_dot(facts: Facts, eqn: Eqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """Each group's rows times its matrix; or, in a backward pass, its rows times its rows."""
    (lhs, rhs, sizes, *others), order = ins, ins[0].order
    if order is None or order.num_values is None or others or sizes.orders:
        return None
    # No size is negative, and no sum of sizes exceeds its dtype, so groups follow each other.
    low, high = sizes.bounds or (-1, 0)
    if eqn.invars[2].aval.dtype not in (np.int32, np.int64):
        return None
    counted = sizes.counts == order.root
    total = high if counted else high * eqn.invars[2].aval.size
    if not counted and not order.by_place:
        return None
    if low < 0 or total > np.iinfo(eqn.invars[2].aval.dtype).max:
        return None
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_sum, rhs_sum), batch = numbers.dot_dimension_numbers
    of_rows = lhs.orders == {order} and [*numbers.lhs_ragged_dimensions] == [lhs.dim]
    if any(batch) or not of_rows or eqn.params["group_offset"] is not None:
        return None
    if lhs.dim in lhs_sum:
        same = rhs.orders == {order} and rhs.order and rhs_sum[lhs_sum.index(lhs.dim)] == rhs.dim
        found = NOTHING if same else None
    else:
        found = Fact(order) if not rhs.orders and lhs.dim == 0 else None
    if found is None:
        return None
    facts.rewrite(eqn, order)
    return [found]


def has_sort(jaxpr: Any) -> bool:
    return any(eqn.primitive.name == "sort" for eqn in _jaxpr.walk(jaxpr))


_RULES = {
    "reshape": _reshape, "squeeze": _reshape, "broadcast_in_dim": _broadcast, "iota": _iota,
    "convert_element_type": _cast, "max": _extremes, "min": _extremes, "top_k": _index_of_extreme,
    "argmax": _index_of_extreme, "argmin": _index_of_extreme, "lt": _less, "eq": _equal,
    "ne": _not_equal, "and": _and, "sign": _sign, "rem": _rem, "div": _div, "add": _add, "mul": _mul,
    "shift_right_arithmetic": _div, "shift_right_logical": _div,
    "select_n": _select, "reduce_sum": _reduce_sum, "sort": _sort, "gather": _gather,
    "scatter": _scatter, "scatter-add": _scatter, "ragged_dot_general": _ragged_dot,
    **dict.fromkeys(("copy", "stop_gradient", "optimization_barrier", "name"), _same),
}  # fmt: skip
