# SPDX-License-Identifier: Apache-2.0
"""Memory-centric tiling: a large matrix is gathered, used and freed tile by tile, and its gradient made so.

A product with a matrix that is gathered, and a product that is only made to be summed over the devices, each
become a loop over tiles, ranges of a dim that no device shares::

    y = x @ all_gather(w)          ->   for t in tiles: y[:, t] = x @ all_gather(w[:, t])
    g = reduce_scatter(x.T @ y)    ->   for t in tiles: g[:, t] = reduce_scatter(x.T @ y[:, t])

`prefetch` gathers a tile beside the product with the one before; a tile of a gradient is reduced beside the
product that makes the next one.

Reference:
  Rajbhandari, Ruwase, Rasley, Smith, He: "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep
  Learning", 2021, section 5.1.3.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.ir import _rules
from jzero.ir._factors import Factor, with_size
from jzero.ir._loops import CarryPort, ConstPort, Scan, SlicePort, any_scan, empty
from jzero.ir._regions import Region, variables
from jzero.ir._sent import cast
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis._untiled import TILES
from jzero.sharding.passes import _origins, _waits
from jzero.sharding.passes._auto_layouts import NO_SPECS, AutoLayouts
from jzero.sharding.passes._chains import only_reader, terms_of, with_size_of
from jzero.sharding.passes._cuts import Tiles, cut, read_range, shape_of_part, write_range
from jzero.sharding.passes._in_place import row_major
from jzero.tracing import _jaxpr
from jzero.tracing._types import Atom, Eqn, Jaxpr, Var

# The writer's name for a value of the program.
ReadAtom = Callable[[Atom], Atom]
# The number of parts into which XLA cuts each dim of the value that an equation moves.
_PartsOf = Callable[[Region, Eqn], Mapping[int, int]]


def tiles(
    jaxpr: Jaxpr, nbytes: int, rows: Sequence[frozenset[str]], itemsize: int = 0,
    specs: AutoLayouts = NO_SPECS,
) -> Jaxpr:  # fmt: skip
    """One device's program that gathers and reduces matrices of more than so many bytes tile by tile.

    `nbytes`: the most bytes of a tile, which has one index of a dim at least.
    `itemsize`: of a gradient's elements in the communication dtype, if larger than their own.
    `specs`: how XLA shards arguments and results over further axes. A tile has a range of each of its parts.
    """
    program = Region(jaxpr, [])
    found, plans = _origins.origins(program, rows), dict[Region, _TilePlan]()
    spec_of = specs.of(program)

    def parts_of(region: Region, eqn: Eqn) -> dict[int, int]:
        return dict(specs.parts_of(spec_of(region, eqn)).cuts)

    def tiled(region: Region, eqn: Eqn, writer: JaxprWriter) -> bool:
        if region not in plans:
            plans[region] = _TilePlan(region, found, nbytes, itemsize, parts_of)
        return plans[region].write(eqn, writer)

    return _origins.rewritten(program, tiled)


class _TiledEquation(NamedTuple):
    eqn: Eqn
    factor: Factor  # that is cut


@dataclasses.dataclass(frozen=True, eq=False)
class _Cone:
    """What is made tile by tile."""

    links: tuple[_TiledEquation, ...]  # equations in their order
    terms: tuple[Atom, ...]  # results of these; their sum is a tile
    tiles: Tiles  # of the value, or of each part that XLA makes of it
    num_parts: int = 1  # that XLA makes of that dim
    pads: tuple[Eqn, ...] = ()  # of a slice's gradient, what then makes one of the stack

    @property
    def eqn(self) -> Eqn:
        return self.links[-1].eqn

    def write(self, writer: JaxprWriter, read: ReadAtom, start: int | Var, size: int) -> Var:
        """Writes one tile; slices the operands that are not made in tiles."""
        made, all_parts = dict[Atom, Var](), size * self.num_parts
        for eqn, factor in self.links:
            ins = [
                made[x] if not _jaxpr.is_literal(x) and x in made
                else read_range(writer, read(x), start, size, dim, self.num_parts)
                for x, dim in zip(eqn.invars, factor.ins, strict=True)
            ]  # fmt: skip
            if factor.reduces:
                outs = [_jaxpr.var_like(eqn.outvars[0].aval, dtype=dtype_of_sum(eqn))]
                params = {**eqn.params, **factor.local(all_parts, 1)}
                params["preferred_element_type"] = outs[0].aval.dtype
                results = writer.clone(eqn, ins, outs, eqn, params)
            else:
                source = _jaxpr.within_scope(eqn, TILES) if _waits.is_gather(eqn) else eqn
                results = with_size_of(writer, eqn, factor, all_parts, ins, source)
            made |= zip(eqn.outvars, results, strict=True)
        return _jaxpr.variable(_added(writer, [made[term] for term in self.terms]))


class _TiledSum(NamedTuple):
    reduces: tuple[Eqn, ...]  # the sums, one axis after the other
    cones: tuple[_Cone, ...]  # terms that are made tile by tile
    # Other terms that are gradients of slices, and what then makes those of stacks.
    slices: tuple[tuple[Atom, tuple[Eqn, ...]], ...]
    untiled: tuple[Atom, ...]  # all other terms


class _TilePlan:
    """What is tiled of the equations of one program, by the ids of equations."""

    def __init__(
        self, region: Region, found: _origins.Origins, nbytes: int, itemsize: int, parts_of: _PartsOf
    ):  # fmt: skip
        self.region, self.found, self.parts_of = region, found, parts_of
        self.nbytes, self.itemsize = nbytes, itemsize
        self.places = {id(eqn): i for i, eqn in enumerate(region.jaxpr.eqns)}
        self.products = dict[int, _Cone]()  # with a gathered matrix
        # Terms of sums in tiles, by the equation in whose place their loop comes.
        self.begins = dict[int, tuple[_Cone, _TiledSum]]()
        self.ends = dict[int, _TiledSum]()  # by the last equation that reduces them
        self.gone = set[int]()  # equations that are not written
        self.shards = dict[_Cone, Atom]()  # what was written for the sum of terms in tiles
        for eqn in region.jaxpr.eqns:
            if _scatters(eqn) and id(eqn) not in self.gone:
                self._plan_sum(eqn)
        for eqn in region.jaxpr.eqns:
            if _is_product(eqn) and id(eqn) not in self.gone:
                for place in (0, 1):
                    if (cone := self._with_gathered(eqn, place)) is not None:
                        self.products[id(eqn)] = cone
        self._drop_unread()

    def write(self, eqn: Eqn, writer: JaxprWriter) -> bool:
        """Writes the replacement of an equation; False if it stays."""
        if id(eqn) in self.begins:
            cone, total = self.begins[id(eqn)]
            self.shards[cone] = _write_sum(writer, cone, total.reduces)
        if id(eqn) in self.products:
            writer.names[eqn.outvars[0]] = _write_product(writer, self.products[id(eqn)])
        elif id(eqn) in self.ends:
            writer.names[eqn.outvars[0]] = self._summed(writer, self.ends[id(eqn)])
        elif id(eqn) not in self.gone:
            return False
        return True

    def _maker(self, atom: Atom) -> Eqn | None:
        index = None if _jaxpr.is_literal(atom) else self.region.makers.get(atom)
        return None if index is None else self.region.jaxpr.eqns[index]

    # -- products with a matrix ------------------------------------------------------------------------
    def _with_gathered(self, eqn: Eqn, place: int) -> _Cone | None:
        before, after = self._gathered(eqn.invars[place])
        if not before or self._gathered(eqn.invars[1 - place])[0]:
            return None
        (whole,), sharded = before[-1].outvars, int(before[-1].params["all_gather_dimension"])
        parts = self.parts_of(self.region, before[-1])
        if self._is_small(whole, whole.aval.dtype.itemsize, parts):
            return None
        ways = {
            dim: way
            for dim in range(whole.aval.ndim)
            if (way := _through(before, after, eqn, place, dim)) is not None
        }
        kept = [dim for dim, way in ways.items() if way[-1].factor.outs[0] is not None]
        # If a product sums over a dim that XLA cuts, XLA would add up each tile's result over its axes.
        ways = {dim: way for dim, way in ways.items() if dim in kept or dim not in parts}
        shape = shape_of_part(whole.aval.shape, parts)
        tiles = cut(shape, whole.aval.dtype.itemsize, sharded, self.nbytes, kept)
        if tiles is None or tiles.dim not in ways:
            return None
        return _Cone(ways[tiles.dim], (eqn.outvars[0],), tiles, parts.get(tiles.dim, 1))

    def _gathered(self, atom: Atom) -> tuple[list[Eqn], list[Eqn]]:
        """The equations from the first gather to the last, and the views behind; nothing without gathers."""
        eqns = list[Eqn]()
        while (eqn := self._maker(atom)) is not None and (_is_gather(eqn) or _passes(eqn)):
            eqns.insert(0, eqn)
            atom = eqn.invars[0]
        places = [i for i, eqn in enumerate(eqns) if _is_gather(eqn)]
        if not places:
            return [], []
        origin = self.found[self.region, eqns[places[0]].invars[0]]
        if origin.differs or origin.of_rows:  # Rows of the batch, and none of the state.
            return [], []
        return eqns[places[0] : places[-1] + 1], eqns[places[-1] + 1 :]

    def _is_small(self, x: Atom, itemsize: int, parts: Mapping[int, int]) -> bool:
        return math.prod(shape_of_part(x.aval.shape, parts)) * itemsize <= self.nbytes

    def _drop_unread(self) -> None:
        """Drops the equations that only gathered matrices of products that are now loops."""
        chains = {id(link.eqn) for cone in self.products.values() for link in cone.links[:-1]}
        read = {*variables(self.region.jaxpr.outvars)}
        for eqn in reversed(self.region.jaxpr.eqns):
            if id(eqn) in chains and read.isdisjoint(eqn.outvars):
                self.gone.add(id(eqn))
            elif id(eqn) not in self.products:
                read.update(variables(eqn.invars))

    # -- sums of products ------------------------------------------------------------------------------
    def _plan_sum(self, eqn: Eqn) -> None:
        """Plans a reduction over devices, one axis after the other, if a term of it can be tiled."""
        reduces = [eqn]
        while (following := only_reader(self.region, eqn.outvars[0])) and _scatters(following):
            reduces.append(eqn := following)
        (x,) = reduces[0].invars
        terms, adds = terms_of(self.region, _jaxpr.variable(x))
        terms.reverse()  # The last one first, as they are added up.
        parts = self.parts_of(self.region, reduces[0])
        if self._is_small(x, max(self.itemsize, *map(self._widest, terms)), parts):
            return
        dims = [int(each.params["scatter_dimension"]) for each in reduces]
        slices = [self._slice(term, dims) for term in terms]
        cones = self._together([x for x, pads in slices if not pads], dims[0], parts)
        for term, pads in slices:
            alone = self._together([term], dims[0], parts) if pads else []
            cones += [dataclasses.replace(cone, pads=pads) for cone in alone]
        made = {term for cone in cones for term in cone.terms}
        rest = [(term, pads) for term, pads in slices if term not in made]
        untiled = tuple(term for term, pads in rest if not pads)
        if not cones and len(untiled) == len(terms):
            return
        apart = tuple(each for each in rest if each[1])
        total = _TiledSum(tuple(reduces), tuple(cones), apart, untiled)
        self.ends[id(reduces[-1])] = total
        self.gone.update(map(id, [*reduces, *adds, *(eqn for _, pads in slices for eqn in pads)]))
        for cone in cones:
            self.gone.update(id(link.eqn) for link in cone.links)
            self.begins[id(cone.eqn)] = cone, total

    def _slice(self, term: Atom, dims: Sequence[int]) -> tuple[Atom, tuple[Eqn, ...]]:
        """The gradient of a slice of a stack, and the pads around it; the term and nothing for others."""
        pads = list[Eqn]()
        while (eqn := self._maker(term)) is not None and eqn.primitive.name == "pad":
            others = not any(any(eqn.params["padding_config"][dim]) for dim in dims)
            zeros = others and self._is_zero(eqn.invars[1])
            if not zeros or only_reader(self.region, eqn.outvars[0]) is None:
                break
            pads.insert(0, eqn)
            term = eqn.invars[0]
        return term, tuple(pads)

    def _is_zero(self, atom: Atom) -> bool:
        if _jaxpr.is_literal(atom):
            return not atom.val
        eqn = self._maker(atom)
        chosen = eqn is not None and eqn.primitive.name == "select_n"
        return eqn is not None and chosen and all(map(self._is_zero, eqn.invars[1:]))

    def _together(
        self, terms: Sequence[Atom], sharded: int, parts: Mapping[int, int]
    ) -> list[_Cone]:
        """Large terms in one loop, if operands that stay alive for it have no more bytes than their sum."""
        itemsize = max([self.itemsize, *map(self._widest, terms)])
        if not terms or self._is_small(terms[0], itemsize, parts):
            return []
        tiles = cut(shape_of_part(terms[0].aval.shape, parts), itemsize, sharded, self.nbytes)
        if tiles is None:
            return []
        made = {x: links for x in terms if (links := self._products_behind(x, tiles.dim))}
        groups, waits = list[list[Atom]](), 0
        for term in sorted(made, key=lambda term: self.region.makers[_jaxpr.variable(term)]):
            if not groups or waits > _waits.nbytes([term]):
                groups.append([])
                waits = 0
            groups[-1].append(term)
            products = [link.eqn for link in made[term] if _is_product(link.eqn)]
            waits += _waits.nbytes(x for eqn in products for x in eqn.invars)
        cones = list[_Cone]()
        for group in groups:
            by_place = {self.places[id(link.eqn)]: link for term in group for link in made[term]}
            ordered = tuple(by_place[i] for i in sorted(by_place))
            cones.append(_Cone(ordered, tuple(group), tiles, parts.get(tiles.dim, 1)))
        return cones

    def _widest(self, atom: Atom) -> int:
        """The largest itemsize of a value and the values it is cast from."""
        size = int(atom.aval.dtype.itemsize)
        while (eqn := self._maker(atom)) is not None and (_passes(eqn) or _adds(eqn)):
            atom = eqn.invars[0]
            size = max(size, int(atom.aval.dtype.itemsize))
        return size

    def _products_behind(self, atom: Atom, dim: int) -> list[_TiledEquation] | None:
        """The products that a value is made of; None if it is made of anything else."""
        eqn = self._maker(atom)
        if eqn is None or only_reader(self.region, _jaxpr.variable(atom)) is None:
            return None
        factor = _rules.factor_to(eqn, dim)
        product = _is_product(eqn)
        if factor is None or not (product or _passes(eqn) or _adds(eqn)) or len(eqn.outvars) > 1:
            return None
        found = [_TiledEquation(eqn, factor)]
        for x, d in zip(eqn.invars, factor.ins, strict=True):
            if product or not x.aval.shape:
                continue
            same = d is not None and x.aval.shape[d] == eqn.outvars[0].aval.shape[dim]
            behind = self._products_behind(x, d) if d is not None and same else None
            if behind is None:
                return None
            found += behind
        return found

    def _summed(self, writer: JaxprWriter, total: _TiledSum) -> Atom:
        found = [_padded(writer, self.shards[cone], cone.pads) for cone in total.cones]
        for term, pads in total.slices:
            shard = _reduced(writer, writer.read(term), total.reduces)
            found.append(_padded(writer, shard, pads))
        if total.untiled:
            whole = _added(writer, [*map(writer.read, total.untiled)])
            found.append(_reduced(writer, whole, total.reduces))
        return _added(writer, found)


def _scatters(eqn: Eqn) -> bool:
    return _waits.is_reduction(eqn) and bool(eqn.params["tiled"])


def _is_gather(eqn: Eqn) -> bool:
    return _waits.is_gather(eqn) and bool(eqn.params["tiled"])


def _is_product(eqn: Eqn) -> bool:
    return eqn.primitive.name == "dot_general"


def _adds(eqn: Eqn) -> bool:
    return eqn.primitive.name in _rules.ADDS


def _passes(eqn: Eqn) -> bool:
    """Whether all elements of its first operand stay as they are, but for casts and padding."""
    if eqn.primitive.name == "broadcast_in_dim":
        return bool(eqn.invars[0].aval.size == eqn.outvars[0].aval.size)
    return _rules.costs(eqn, *_origins.VIEWS) or eqn.primitive.name == "pad"


def _through(
    before: Sequence[Eqn], after: Sequence[Eqn], product: Eqn, place: int, dim: int
) -> tuple[_TiledEquation, ...] | None:
    """From shard to product, cut along `dim` of the gathered matrix; None if that is impossible."""
    links, d = list[_TiledEquation](), dim
    for eqn in reversed(before):
        factor = _rules.factor_to(eqn, d)
        if factor is None or factor.ins[0] is None:
            return None
        links.insert(0, _TiledEquation(eqn, factor))
        d = factor.ins[0]
    d, size = dim, before[-1].outvars[0].aval.shape[dim]
    for eqn in after:
        factor = _rules.factor_of(eqn, 0, d)
        if factor is None or factor.outs[0] is None:
            return None
        links.append(_TiledEquation(eqn, factor))
        d = factor.outs[0]
        if eqn.outvars[0].aval.shape[d] != size:
            return None
    found = _rules.factor_of(product, place, d)
    return None if found is None else (*links, _TiledEquation(product, found))


# -- loops ---------------------------------------------------------------------------------------------
def _write_product(writer: JaxprWriter, cone: _Cone) -> Atom:
    """Tiles of the result are concatenated, or added if the product contracts the dim."""
    (out,), (dim,), tiles = cone.eqn.outvars, cone.links[-1].factor.outs, cone.tiles
    dtype = dtype_of_sum(cone.eqn) if dim is None else out.aval.dtype

    def used(here: JaxprWriter, read: ReadAtom, start: int | Var, size: int, total: Atom) -> Atom:
        y = cone.write(here, read, start, size)
        return (
            here.add(lax.add_p, [total, y])[0]
            if dim is None
            else write_range(here, total, y, start, dim, cone.num_parts)
        )

    def body(here: JaxprWriter, read: ReadAtom, start: Var, carry: Sequence[Var]) -> list[Atom]:
        return [used(here, read, start, tiles.tile, carry[0])]

    total: Atom = empty(writer, _jaxpr.var_like(out.aval, dtype=dtype))
    (total,) = _loop(writer, cone.eqn, tiles, 0, [total], body)
    if tiles.rest:
        total = used(writer, writer.read, tiles.num * tiles.tile, tiles.rest, total)
    return writer.trace(cast, total, static=(str(out.aval.dtype),))[0]


def _write_sum(writer: JaxprWriter, cone: _Cone, reduces: Sequence[Eqn]) -> Atom:
    """This device's shard of a sum of products; each tile is reduced beside the next tile's products."""
    dim, tiles, (out,) = cone.tiles.dim, cone.tiles, reduces[-1].outvars
    sharded = int(reduces[0].params["scatter_dimension"])
    shard = with_size(cone.terms[0].aval.shape, sharded, out.aval.shape[sharded])

    def put(here: JaxprWriter, total: Atom, shard: Atom, start: int | Var) -> Atom:
        # [Note: layouts at rest]
        return here.trace(row_major, write_range(here, total, shard, start, dim, cone.num_parts))[0]

    def body(here: JaxprWriter, read: ReadAtom, start: Var, carry: Sequence[Var]) -> list[Atom]:
        total, tile = carry
        following = cone.write(here, read, start, tiles.tile)
        # Else the compiler hides this copy behind the next tile's product, and not the reduction.
        shard = _reduced(here, tile, reduces, TILES)
        # All of the next tile, which the loop carries: of an element XLA would tell all of its places.
        both = [shard, following]
        shard, following = here.add(lax.optimization_barrier_p, both, [*map(_jaxpr.new_var, both)])
        step = _jaxpr.scalar(tiles.tile, np.int32)
        return [put(here, total, shard, here.add(lax.sub_p, [start, step])[0]), following]

    first = cone.write(writer, writer.read, 0, tiles.tile)
    total: Atom
    total, tile = _loop(
        writer, cone.eqn, tiles, 1, [empty(writer, _jaxpr.var_like(out.aval, shard)), first], body
    )
    done = tiles.num * tiles.tile
    lasts = [(done - tiles.tile, tile)]
    if tiles.rest:
        lasts.append((done, cone.write(writer, writer.read, done, tiles.rest)))
    for at, x in lasts:
        total = put(writer, total, _reduced(writer, x, reduces, TILES), at)
    return total


def _reduced(writer: JaxprWriter, x: Atom, reduces: Sequence[Eqn], *scopes: str) -> Atom:
    for eqn in reduces:
        (out,), dim = eqn.outvars, int(eqn.params["scatter_dimension"])
        new = _jaxpr.var_like(out.aval, with_size(x.aval.shape, dim, out.aval.shape[dim]))
        (x,) = writer.clone(eqn, [x], [new], _jaxpr.within_scope(eqn, *scopes))
    return x


def _padded(writer: JaxprWriter, x: Atom, pads: Sequence[Eqn]) -> Atom:
    for eqn in pads:
        (x,) = writer.add(eqn.primitive, [x, writer.read(eqn.invars[1])], None, eqn, **eqn.params)
    return x


def _loop(
    writer: JaxprWriter, source: Eqn, tiles: Tiles, first: int, inits: Sequence[Atom],
    body: Callable[[JaxprWriter, ReadAtom, Var, Sequence[Var]], list[Atom]],
) -> list[Var]:  # fmt: skip
    """`for tile in tiles[first:]: carry = body(start of tile, carry)`, of tiles of the full size."""
    source, num = _jaxpr.within_scope(source, TILES), tiles.num - first
    here, consts = JaxprWriter(source), dict[Var, Var]()

    def read(atom: Atom) -> Atom:
        outer = writer.read(atom)
        if _jaxpr.is_literal(outer):
            return outer
        return consts.setdefault(outer, _jaxpr.new_var(outer))

    start, carry = _jaxpr.var_like(None, (), np.dtype(np.int32)), [*map(_jaxpr.new_var, inits)]
    afters, outs = body(here, read, start, carry), [*map(_jaxpr.new_var, inits)]
    (starts,) = writer.trace(_starts, static=(first, num, tiles.tile))
    assert not here.consts, "an iteration has no constants"
    scan = dataclasses.replace(
        Scan.of(any_scan(source)), eqns=tuple(here.eqns), length=num,
        consts=tuple(ConstPort(*port) for port in consts.items()), xs=(SlicePort(starts, start),),
        carries=tuple(map(CarryPort, inits, carry, afters, outs)),
    )  # fmt: skip
    writer.eqns.append(scan.equation())
    return outs


def _added(writer: JaxprWriter, terms: Sequence[Atom]) -> Atom:
    return functools.reduce(lambda x, y: writer.add(lax.add_p, [x, y])[0], terms)


def dtype_of_sum(eqn: Eqn) -> Any:
    """The accumulation dtype of tiles' products: float32 for products of 16 bits."""
    dtype = eqn.outvars[0].aval.dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    # An algorithm, unlike a precision, says what it sums in, and returns nothing else.
    chosen = isinstance(eqn.params["precision"], lax.DotAlgorithm | lax.DotAlgorithmPreset)
    return jnp.dtype(jnp.float32) if narrow and not chosen else dtype


# -- traced ------------------------------------------------------------------------------------------------
def _starts(first: int, num: int, size: int) -> jax.Array:
    return (lax.iota(jnp.int32, num) + np.int32(first)) * np.int32(size)
