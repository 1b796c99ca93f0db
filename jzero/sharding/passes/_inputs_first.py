# SPDX-License-Identifier: Apache-2.0
"""Orders a large matrix's backward products: its input's gradient first, which frees the gathered matrix.

Of `y = x @ w`, JAX's AD writes the gradient of `w [n, d]`, `x.T @ ct`, before that of `x`, `ct @ w.T`. In
that order the gathered matrix and its whole gradient are alive together; in the other one the matrix is freed
before its gradient is made. Its gather waits for the cotangent: what a loss makes of logits is as large.
"""

from __future__ import annotations

from jax import lax

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.passes import _waits
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Jaxpr, Primitive, Var

COTANGENT = "jzero.cotangent"  # the name of one whose product with a gathered matrix comes first


def inputs_first(jaxpr: Jaxpr, nbytes: int) -> Jaxpr:
    """One device's program, in which large matrices' gradients come after those of their inputs."""
    if not any(_may_be_late(eqn, nbytes) for eqn in jaxpr.eqns):
        return jaxpr
    every = {axis for e in _jaxpr.walk(jaxpr) if e.primitive.name in _frames.COLLECTIVES
             for axis in _jaxpr.axes_of(e)}  # fmt: skip
    frame = _frames.build_frames(jaxpr, [], [frozenset(every)] * len(jaxpr.invars))
    found = inputs_first_in(frame, nbytes)
    return _waits.with_equations(jaxpr, found.jaxpr.eqns, found.jaxpr.outvars)


def inputs_first_in(frame: Frame, nbytes: int) -> Frame:
    jaxpr, products = frame.jaxpr, _products(frame, nbytes)
    if not products:
        return frame
    writer = JaxprWriter(jaxpr.eqns[0])  # its names: what is read behind a barrier
    late: dict[int, list[Eqn]] = {product: [] for product in products.values()}
    made: dict[Var, int] = {}  # by what is late, and behind which product
    for index, eqn in enumerate(jaxpr.eqns):
        due = {made[var] for var in variables(eqn.invars) if made.get(var) in late}
        if index in products:
            due.add(products[index])
        elif due and (index in late or _jaxpr.has_side_effects(eqn)):
            for product in sorted(p for p in late if p <= max(due)):
                writer.keep(late.pop(product))
            due = set()  # It cannot be late, and so nothing that it reads can.
        if due:
            late[max(due)].append(eqn)
            made |= dict.fromkeys(eqn.outvars, max(due))
        elif late.get(index):
            gradient, *followers = late.pop(index)
            _write_in_order(writer, eqn, gradient)
            writer.keep(followers)
        else:
            writer.keep([eqn])
    outvars = [*map(writer.read, jaxpr.outvars)]
    flat = _rewrite.Flat([*jaxpr.constvars], [*jaxpr.invars], outvars, writer.eqns)
    varying = [frame.varying[var] for var in jaxpr.invars]
    return _frames.build_frames(flat, frame.consts, varying, frame.autodiff)


def _products(frame: Frame, nbytes: int) -> dict[int, int]:
    """The later product that reads the matrix, and the gradient of each large matrix, by index."""
    eqns, found = frame.jaxpr.eqns, dict[int, int]()
    for index, eqn in enumerate(eqns):
        if not _may_be_late(eqn, nbytes) or not _is_reduced(frame, eqn.outvars[0]):
            continue
        later = {
            i for var in variables(eqn.invars) if frame.varies(var)
            for i in frame.readers[var] if index < i < len(eqns)
        }  # fmt: skip
        matching = [i for i in sorted(later) if _reads_matrix(frame, eqns[i], eqn, nbytes)]
        if matching:
            found[matching[0]] = index
    return {gradient: product for product, gradient in found.items()}


def _may_be_late(eqn: Eqn, nbytes: int) -> bool:
    return eqn.primitive.name == "dot_general" and _is_large(eqn.outvars[0], nbytes)


def _is_reduced(frame: Frame, var: Var) -> bool:
    """Whether it is read by one reduction only, possibly added to others, or a view that is scattered."""
    eqns, views = frame.jaxpr.eqns, 0
    while len(readers := frame.readers.get(var, [])) == 1 and readers[0] < len(eqns):
        eqn = eqns[readers[0]]
        if eqn.primitive.name not in (*_VIEWS, *_rules.ADDS):
            scatters = eqn.primitive.name == "reduce_scatter"
            return scatters or (not views and eqn.primitive.name in _frames.REDUCTIONS)
        (var,), views = eqn.outvars, views + 1
    return False


_VIEWS = _rules.named(_rules.Cost.VIEW) | _rules.named(_rules.Cost.CAST)


def _is_large(var: Var, nbytes: int) -> bool:
    return _rules.size_in_bytes(var.aval) > nbytes


def _reads_matrix(frame: Frame, eqn: Eqn, gradient: Eqn, nbytes: int) -> bool:
    """Whether it is a product of the same pass with a large matrix of the gradient's size."""
    return (
        eqn.primitive.name == "dot_general"
        and frame.pass_of(eqn) == frame.pass_of(gradient)
        and any(
            not frame.varies(var)
            and var.aval.size == gradient.outvars[0].aval.size
            and _is_large(var, nbytes)
            for var in variables(eqn.invars)
        )
    )


def _write_in_order(writer: JaxprWriter, product: Eqn, gradient: Eqn) -> None:
    """A product and then a gradient; readers of the product read it behind a barrier for both."""
    ins, own = ([*map(writer.read, eqn.invars)] for eqn in (product, gradient))
    shared = [var for var in variables(ins) if var in own]
    (held, *_) = [*(var for var in variables(own) if var not in shared), *shared]
    # The barrier keeps the value in one piece: the compiler would else compute a token's element twice.
    whole = {var: _alike(writer, lax.optimization_barrier_p, var, product) for var in shared}
    names = {
        var: _alike(writer, _jaxpr.name_p, whole[var], product, name=COTANGENT) for var in shared
    }
    writer.clone(product, [*map(JaxprWriter(product, names).read, ins)], product.outvars)
    here = {var: _jaxpr.new_var(var) for var in (held, *product.outvars)}
    writer.add(lax.optimization_barrier_p, [*here], [*here.values()], gradient)
    writer.names |= {var: here[var] for var in product.outvars}
    writer.clone(gradient, [*map(JaxprWriter(gradient, whole | here).read, own)], gradient.outvars)


def _alike(writer: JaxprWriter, primitive: Primitive, var: Var, source: Eqn, **params: str) -> Var:
    (out,) = writer.add(primitive, [var], [_jaxpr.new_var(var)], source, **params)
    return out
