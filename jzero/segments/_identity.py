# SPDX-License-Identifier: Apache-2.0
"""Lines that describe all that a program depends on, which the processes of a run compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

from jzero._errors import describe_leaf
from jzero.processes import _agreement
from jzero.processes._unlike import PROGRAM, SHAPES
from jzero.segments._program import Program
from jzero.sharding.plan._config import StepConfig
from jzero.sharding.plan._leaves import LeafPlan
from jzero.tracing import _call, _jaxpr
from jzero.tracing._signature import Call


def of_state(config: StepConfig, leaves: Sequence[LeafPlan]) -> dict[str, list[str]]:
    """Versions, options, mesh, and where each leaf is stored."""
    options = config.options
    axes = ", ".join(f"{name}={size}" for name, size in config.mesh.shape.items())
    return {
        "versions": [f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"],
        "options": [f"{x.name}={getattr(options, x.name)!r}" for x in dataclasses.fields(options)],
        "mesh": [
            f"{axes}; data axes {config.axis_names}",
            *(f"device {d.id} of process {d.process_index}" for d in config.mesh.devices.flat),
        ],
        "state": [leaf.row() for leaf in leaves],
    }


def of_call(call: Call) -> dict[str, list[str]]:
    """The arguments of a call, which are known before its program is built."""
    arguments = [line for name, tree in call.arrays.items() for line in _described(name, tree)]
    return {"arguments": arguments, SHAPES: _described("state", call.state)}


def _described(name: str, tree: Any) -> list[str]:
    pairs = zip(_call.leaf_paths(tree, name), jax.tree.leaves(tree), strict=True)
    return [_line(path, leaf) for path, leaf in pairs]


def _line(path: str, leaf: Any) -> str:
    try:
        aval = _call.abstract_leaf(leaf)
    except (TypeError, ValueError):
        return f"{path} {type(leaf).__name__}"
    return describe_leaf(path, aval.shape, aval.dtype)


def of_program(
    config: StepConfig, call: Call, program: Program, traced: Any
) -> dict[str, list[str]]:
    """`of_state`, `of_call`, and the trace of the program: all that decides what is compiled."""
    paths = _call.argument_paths(call.arrays)
    pairs = zip(paths, program.argument_shardings, strict=True)
    state = of_state(config, program.plan.leaves)
    return state | {
        "state": [*state["state"], f"plan {program.plan.fingerprint}"],
        **of_call(call),
        "layouts": [f"{path} {sharding.spec}" for path, sharding in pairs],
        **of_jaxpr(*_jaxpr.open_jaxpr(traced.jaxpr)),
    }


def of_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> dict[str, list[str]]:
    """A jaxpr's equations, and checksums of its constants."""
    constants = [f"constant {_agreement.checksum(value)}" for value in consts]
    return {PROGRAM: [*str(jaxpr).splitlines(), *constants]}
