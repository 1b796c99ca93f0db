# SPDX-License-Identifier: Apache-2.0
"""One run of a segment in parts: a visit for each of them, and for each turn of a loop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import jax

from jzero.ir._regions import variables
from jzero.offload._loop_run import LoopRun, OnEnd
from jzero.offload._part_values import PartValues
from jzero.offload._pinned import Visit
from jzero.segments._segment import Arrays
from jzero.sharding.cut._layer_parts import LayerLoop, LayerPart, NestedLoop, Stretch


def visits(values: PartValues, parts: Iterable[LayerPart], over: OnEnd) -> Iterator[Visit | None]:
    """A visit for each part, and for each turn of a loop.

    Args:
      values: of the run.
      parts: of a segment, or of a turn of a loop.
      over: called when one is.
    """
    for part in parts:
        if isinstance(part, Stretch):
            yield Visit(
                part.nbytes,
                functools.partial(_fetch, values, part),
                functools.partial(_run, values, part),
                functools.partial(over, part, None),
                values.wanted(part.leaves),
            )
        elif isinstance(part, LayerLoop):
            yield from LoopRun(values, part, over).visits()
        else:
            yield from _nested(values, part, over)


def _fetch(values: PartValues, part: Stretch) -> Arrays:
    values.back(part.reads)
    return values.fetch(part.leaves)


def _run(values: PartValues, part: Stretch, leaves: Arrays) -> Arrays:
    values.back(part.reads)  # what the part before has made
    made, done = values.cut.programs.stretch(part)(leaves, values.env)
    values.env.update(zip(part.gives, made, strict=True))
    copies = [*values.send(part.gives), *values.away(part.gives, values.env)]
    values.drop(part)
    return copies or [done]


def _nested(values: PartValues, part: NestedLoop, over: OnEnd) -> Iterator[Visit | None]:
    """The visits of a loop's parts, turn by turn."""
    loop, programs, env = part.loop, values.cut.programs, values.env
    made = {out for eqn in loop.body.eqns for out in eqn.outvars}

    def enter(_: Arrays) -> Arrays:
        values.back(part.reads)
        first = env | values.held(variables(part.init))
        env.update(zip(loop.carry, programs.enter(part)(first), strict=True))
        return []

    def renew(_: Arrays) -> Arrays:
        carry = programs.renew(part)(env)
        for var in made.intersection(variables(loop.body.outvars)):
            del env[var]
        env.update(zip(loop.carry, carry, strict=True))
        return []

    def leave(_: Arrays) -> Arrays:
        carry = [env.pop(var) for var in loop.carry]
        env.update((v, x) for v, x in zip(loop.results, carry, strict=True) if v is not None)
        copies = values.send(part.eqn.outvars)
        values.drop(part)
        return copies

    yield Visit(0, list, enter)
    for turn in itertools.count() if loop.length is None else range(loop.length):
        if loop.length is None:
            yield None
            asked = programs.goes_on(part)(env)
            # A trace of what is started has one turn.
            if turn if isinstance(asked, jax.core.Tracer) else not jax.device_get(asked):
                break
        yield from visits(values, part.parts, lambda *_: None)
        yield Visit(0, list, renew)
    yield Visit(0, list, leave, functools.partial(over, part, None))
