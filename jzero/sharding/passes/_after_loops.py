# SPDX-License-Identifier: Apache-2.0
"""Nothing that gathers starts before the loop in front of it, and its peeled last iteration, are done."""

from __future__ import annotations

from jax import lax

from jzero.ir._regions import region_of, variables
from jzero.ir._writer import JaxprWriter
from jzero.sharding.passes import _waits
from jzero.sharding.passes._waits import AFTER_LOOP as SCOPE
from jzero.sharding.passes._waits import LAST_ITERATION
from jzero.tracing import _jaxpr
from jzero.tracing._types import Eqn, Jaxpr, Var

# [Note: the end of a loop]
# The last iteration of a pipelined loop stands behind it, among all other equations. XLA would compute a
# stack with its last slice anew for every reader, into copies. And a gather behind a loop that reads nothing
# of it could run before it: what it gathers is alive through all iterations, and the compiler may let the
# gather of the forward pass serve the backward pass.


def after_loops(jaxpr: Jaxpr) -> Jaxpr:
    """One device's program, in which equations after a loop that gathers run after it."""
    eqns = [_jaxpr.with_inner(eqn, after_loops) for eqn in jaxpr.eqns]
    jaxpr = _waits.with_equations(jaxpr, eqns)
    loops = [i for i, eqn in enumerate(jaxpr.eqns) if _waits.gathers_inside(eqn)]
    if not loops:
        return jaxpr
    made = _made(jaxpr, loops)
    writer = JaxprWriter(jaxpr.eqns[0])  # its names: what is read behind the end of a loop
    token: Var | None = None
    waits = set[Var]()  # what depends on the latest loop
    for i, eqn in enumerate(jaxpr.eqns):
        eqn = writer.renamed(eqn)
        if _waits.is_gather(eqn) and token is not None and waits.isdisjoint(variables(eqn.invars)):
            barriers, eqn = _waits.waiting(eqn, [token], SCOPE)
            writer.eqns += barriers
        writer.eqns.append(eqn)
        if i in loops:
            token, waits = _waits.done(eqn), set(eqn.outvars)
        elif not waits.isdisjoint(variables(eqn.invars)):
            waits.update(eqn.outvars)
        if i in made:
            source, fresh = _jaxpr.within_scope(eqn, SCOPE), [*map(_jaxpr.new_var, made[i])]
            writer.add(lax.optimization_barrier_p, made[i], fresh, source)
            writer.names |= zip(made[i], fresh, strict=True)
            waits.update(fresh)
    outs = [*map(writer.read, jaxpr.outvars)]
    return _waits.with_equations(jaxpr, writer.eqns, outs)


def _made(jaxpr: Jaxpr, loops: list[int]) -> dict[int, list[Var]]:
    """Results of a loop's last iteration with readers behind it, by the index where the iteration ends."""
    readers, ends = region_of(jaxpr.eqns).readers, dict[int, list[Eqn]]()
    returned = set(variables(jaxpr.outvars))
    for start, stop in zip(loops, [*loops[1:], len(jaxpr.eqns)], strict=True):
        last = [i for i in range(start, stop) if _jaxpr.in_scope(jaxpr.eqns[i], LAST_ITERATION)]
        mine = [i for i in last if not _jaxpr.in_scope(jaxpr.eqns[i], SCOPE)]
        if mine:
            ends[mine[-1]] = [jaxpr.eqns[i] for i in mine]

    def is_read(var: Var, end: int) -> bool:
        if _jaxpr.is_on_host(var.aval):  # Whoever fetches slices of it waits for none of this.
            return False
        later = [jaxpr.eqns[i] for i in readers.get(var, ()) if i > end]
        return var in returned or not all(_jaxpr.in_scope(eqn, SCOPE) for eqn in later)

    found = {
        end: [v for e in eqns for v in e.outvars if is_read(v, end)] for end, eqns in ends.items()
    }
    return {end: made for end, made in found.items() if made}
