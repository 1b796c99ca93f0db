"""What makes one program another one, in lines: what the processes of a run compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

from jzero import _call, _jaxpr, _processes
from jzero._errors import describe_leaf
from jzero._program import Program
from jzero._setting import Setting
from jzero.sharding._plan import LeafPlan


def of_state(setting: Setting, leaves: Sequence[LeafPlan]) -> dict[str, list[str]]:
    """Versions, options, mesh, and where each leaf rests."""
    options = dataclasses.asdict(setting.options)
    axes = ", ".join(f"{name}={size}" for name, size in setting.mesh.shape.items())
    return {
        "versions": [f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"],
        "options": [f"{name}={value!r}" for name, value in options.items()],
        "mesh": [
            f"{axes}; data axes {setting.axis_names}",
            *(f"device {d.id} of process {d.process_index}" for d in setting.mesh.devices.flat),
        ],
        "state": [leaf.row() for leaf in leaves],
    }


def of_program(
    setting: Setting, call: _call.Call, program: Program, traced: Any
) -> dict[str, list[str]]:
    """The same, the arguments, and the program: all that decides what is compiled.

    Args:
      setting: what the program was built for.
      call: a call of it.
      program: it.
      traced: the trace of `program.step` for this call.
    """
    paths = _call.argument_paths(call.arrays)
    leaves = map(_call.abstract_leaf, jax.tree.leaves(call.arrays))
    arguments = [
        f"{describe_leaf(path, leaf.shape, leaf.dtype)} {sharding.spec}"
        for path, leaf, sharding in zip(paths, leaves, program.argument_shardings, strict=True)
    ]
    state = of_state(setting, program.plan.leaves)
    return state | {
        "state": [*state["state"], f"plan {program.plan.fingerprint}"],
        "arguments": arguments,
        **of_jaxpr(*_jaxpr.open_jaxpr(traced.jaxpr)),
    }


def of_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> dict[str, list[str]]:
    """A jaxpr's equations, and its constants by their checksums."""
    constants = [f"constant {_processes.checksum(value)}" for value in consts]
    return {_processes.PROGRAM: [*str(jaxpr).splitlines(), *constants]}
