# SPDX-License-Identifier: Apache-2.0
"""When a backward loop's iteration gathers for the next one: at once, or after its own gathers."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import jax

from jzero.sharding.passes import _waits
from jzero.sharding.passes._waits import PRODUCTS, nbytes
from jzero.targets._links import collective_time
from jzero.targets._target import target_of, topology_of
from jzero.tracing import _jaxpr
from jzero.tracing._jaxpr import Eqn, Jaxpr, Var

# [Note: late gathers]
# A layer that is larger than `prefetch_bytes` is gathered in part by the iteration before, in part by its
# own, beside its products. Where collectives take longer than products the wire never rests, so nothing is
# gained by gathers for the next iteration that begin with this one: they come before those that it waits for,
# and are in memory beside all of its own weights and the first whole gradients. There they wait for the
# product that first uses the last weight which the iteration gathers itself. Where products take longer, XLA
# chooses from all of them what hides what; the same order would leave gathers at the end of the iteration,
# with nothing to hide behind (experiments/rivals).

_LARGE = 2**30  # bytes of a gather whose latency is nothing beside its time


def balance(devices: Sequence[jax.Device], group: Collection[int]) -> float:
    """Multiplications in the time in which a group of these devices gathers a byte, by their target."""
    target, topology = target_of(devices), topology_of(devices)
    time = collective_time("all-gather", group, _LARGE, target, topology)
    return target.bf16_flops / 2 * time.wire / _LARGE


def latest_use(jaxpr: Jaxpr, ahead: Sequence[Var], balance: float) -> list[Var]:
    """The result that the next iteration's gathers wait for, if any, [Note: late gathers].

    `ahead`: what the iteration before has gathered, or fetched.
    `balance`: multiplications for each byte that is moved above which products take longer.
    """
    uses = _first_uses(jaxpr, ahead)
    own = [at for var, at in uses.items() if var not in {*ahead}]
    reduced = [
        v for eqn in jaxpr.eqns if _waits.is_reduction(eqn) for v in _jaxpr.variables_read(eqn)
    ]
    work, moved = sum(map(_work, jaxpr.eqns)), nbytes([*uses, *reduced])
    if not own or not reduced or work >= balance * moved:
        return []
    return [var for var in jaxpr.eqns[max(own)].outvars if not _jaxpr.is_dropped(var)][:1]


def _first_uses(jaxpr: Jaxpr, ahead: Sequence[Var]) -> dict[Var, int]:
    """The index of the first product that reads a gathered value, or a view or cast of it."""
    views = {var: var for var in ahead}
    uses: dict[Var, int] = {}
    for n, eqn in enumerate(jaxpr.eqns):
        reads = [var for var in _jaxpr.variables_read(eqn) if var in views]
        if _waits.is_gather(eqn):
            views |= {var: var for var in eqn.outvars}
        elif eqn.primitive.name in PRODUCTS:
            for var in reads:
                uses.setdefault(views[var], n)
        elif reads and len(_jaxpr.variables_read(eqn)) == 1:
            views |= dict.fromkeys(eqn.outvars, views[reads[0]])
    return uses


def _work(eqn: Eqn) -> float:
    """Multiplications of a matrix product; of another product, of a matrix product of its sizes."""
    if eqn.primitive.name not in PRODUCTS:
        return 0.0
    shapes = [atom.aval.shape for atom in eqn.invars]
    made = max((math.prod(var.aval.shape) for var in eqn.outvars), default=0)
    if eqn.primitive.name == "dot_general":
        (summed, _), _ = eqn.params["dimension_numbers"]
        return float(made * math.prod(shapes[0][dim] for dim in summed))
    return math.sqrt(made * math.prod(sorted(map(math.prod, shapes))[-2:]))
