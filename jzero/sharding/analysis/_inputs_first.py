# SPDX-License-Identifier: Apache-2.0
"""Which of two products with one cotangent runs first, where the matrix is large: that with the matrix.

Of `y = x @ w`, JAX's AD writes the gradient of `w [n, d]`, `x.T @ ct`, before that of `x`, `ct @ w.T`. In
that order both the gathered matrix and its whole gradient are there; in the other one the matrix is gone
before its gradient is made. Its gather waits for the cotangent: what a loss makes of logits is as large.
"""

from __future__ import annotations

from jax import lax

from jzero.ir import _rules
from jzero.ir._regions import variables
from jzero.sharding.analysis import _frames
from jzero.sharding.analysis._frames import Frame
from jzero.tracing import _jaxpr, _rewrite
from jzero.tracing._types import Eqn, Var

COTANGENT = "jzero.cotangent"  # the name of one whose product with a gathered matrix comes first


def inputs_first(frame: Frame, nbytes: int) -> Frame:
    """The step with the gradient of each matrix of more than so many bytes behind that of its input.

    Args:
      frame: of the step.
      nbytes: the most that a matrix and its gradient may have to stay in the order of the program.
    """
    jaxpr, products = frame.jaxpr, _products(frame, nbytes)
    if not products:
        return frame
    eqns, behind = list[Eqn](), dict[Var, Var]()
    late: dict[int, list[Eqn]] = {product: [] for product in products.values()}
    made: dict[Var, int] = {}  # by what is late, and behind which product
    for index, eqn in enumerate(jaxpr.eqns):
        due = {made[var] for var in variables(eqn.invars) if made.get(var) in late}
        if index in products:
            due.add(products[index])
        elif due and (index in late or _jaxpr.has_side_effects(eqn)):
            for product in sorted(p for p in late if p <= max(due)):
                eqns += [_renamed(each, behind) for each in late.pop(product)]
            due = set()  # It cannot be late, and so nothing that it reads can.
        if due:
            late[max(due)].append(eqn)
            made |= dict.fromkeys(eqn.outvars, max(due))
        elif late.get(index):
            gradient, *followers = late.pop(index)
            eqns += _in_order(_renamed(eqn, behind), _renamed(gradient, behind), behind)
            eqns += [_renamed(each, behind) for each in followers]
        else:
            eqns.append(_renamed(eqn, behind))
    outvars = [a if _jaxpr.is_literal(a) else behind.get(a, a) for a in jaxpr.outvars]
    flat = _rewrite.Flat([*jaxpr.constvars], [*jaxpr.invars], outvars, eqns)
    varying = [frame.varying[var] for var in jaxpr.invars]
    return _frames.build_frames(flat, frame.consts, varying, frame.autodiff)


def _products(frame: Frame, nbytes: int) -> dict[int, int]:
    """The gradient of each large matrix, and the product after it with the matrix, by their indices."""
    eqns, found = frame.jaxpr.eqns, dict[int, int]()
    for index, eqn in enumerate(eqns):
        if eqn.primitive.name != "dot_general":
            continue
        (out,), readers = eqn.outvars, frame.readers.get(eqn.outvars[0], [])
        if not _is_large(out, nbytes) or len(readers) != 1 or readers[0] == len(eqns):
            continue
        if eqns[readers[0]].primitive.name not in _frames.REDUCTIONS:
            continue
        later = {
            i for var in variables(eqn.invars) if frame.varies(var)
            for i in frame.readers[var] if index < i < len(eqns)
        }  # fmt: skip
        matching = [i for i in sorted(later) if _reads_matrix(frame, eqns[i], eqn, nbytes)]
        if matching:
            found[matching[0]] = index
    return {gradient: product for product, gradient in found.items()}


def _is_large(var: Var, nbytes: int) -> bool:
    return _rules.size_in_bytes(var.aval) > nbytes


def _reads_matrix(frame: Frame, eqn: Eqn, gradient: Eqn, nbytes: int) -> bool:
    """Whether it is a product of the same pass with a large matrix that has the size of the gradient."""
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


def _in_order(product: Eqn, gradient: Eqn, behind: dict[Var, Var]) -> list[Eqn]:
    """A product, and behind it a gradient: what reads the product reads it behind a barrier for both."""
    shared = [var for var in variables(product.invars) if var in gradient.invars]
    (held, *_) = [*(var for var in variables(gradient.invars) if var not in shared), *shared]
    # A token of it is one of a whole value: the compiler would else compute one element twice.
    whole, names = [{var: _jaxpr.new_var(var) for var in shared} for _ in range(2)]
    marks = [
        *(
            _jaxpr.equation(lax.optimization_barrier_p, [var], [new], product)
            for var, new in whole.items()
        ),
        *(
            _jaxpr.equation(_jaxpr.name_p, [whole[var]], [new], product, name=COTANGENT)
            for var, new in names.items()
        ),
    ]
    here = {var: _jaxpr.new_var(var) for var in (held, *product.outvars)}
    barrier = _jaxpr.equation(
        lax.optimization_barrier_p, [*here], [*here.values()], source=gradient
    )
    behind |= {var: here[var] for var in product.outvars}
    return [*marks, _renamed(product, names), barrier, _renamed(gradient, whole | here)]


def _renamed(eqn: Eqn, names: dict[Var, Var]) -> Eqn:
    if names.keys().isdisjoint(variables(eqn.invars)):
        return eqn
    return eqn.replace(invars=[a if _jaxpr.is_literal(a) else names.get(a, a) for a in eqn.invars])
