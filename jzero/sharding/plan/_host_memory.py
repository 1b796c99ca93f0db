# SPDX-License-Identifier: Apache-2.0
"""Stacks in the host's memory, which XLA's compiler for GPUs once read and wrote at wrong places."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from jzero._errors import OptionError, StepError, message
from jzero.sharding.analysis._frames import Frame
from jzero.sharding.analysis._residuals import Residuals
from jzero.sharding.plan._options import Options
from jzero.tracing import _call, _jaxpr, _lines

# XLA took the place of a slice in a backward loop, n - 1 - i, for i, silently: openxla/xla pull requests
# 46231 and 46308, of ten days after JAX 0.11.0. What JAX 0.11.1, 0.11.2 and 0.12 compile was read to be right
# (test_activations_on_gpus.py).
RIGHT_SINCE = (0, 11, 1)
_SINCE = ".".join(map(str, RIGHT_SINCE))
_RULE = (
    f"Before JAX {_SINCE}, XLA reads such slices at wrong offsets on GPUs, and silently "
    "trains wrong."
)


def check(options: Options, frame: Frame, waiting: Residuals, mesh: Any) -> None:
    """Refuses loops over stacks on the host where they would be compiled wrong.

    Where layers are programs of their own (`Memory(params=)`), global arrays move between programs, and no
    slices; except in loops that hold both passes, of microbatches or the step's own.
    """
    if jax.__version_info__ >= RIGHT_SINCE:
        return
    own = [
        f"{atom.aval.dtype}[{', '.join(map(str, atom.aval.shape))}]{_lines.at_line(eqn)}"
        for _, eqn in frame.walk() if eqn.primitive.name == "scan"
        for atom in eqn.outvars if _jaxpr.is_on_host(atom.aval)
    ]  # fmt: skip
    moves = options.moves_activations and (
        not options.offload.streams
        or (options.microbatches.num > 1 and not options.by_layer)
        or any(region is not frame for region, _ in waiting)  # in loops that hold both passes
    )
    if not (own or moves) or platform_of(mesh) not in ("gpu", "cuda"):
        return
    there, edit = f"on GPUs with JAX {jax.__version__}", f"Use JAX {_SINCE} or newer"
    if moves:
        raise OptionError(message(
            _call.WHO, f"Memory(activations={options.activations!r}) {there}", _RULE,
            f"{edit}, or drop it."))  # fmt: skip
    raise StepError(message(
        _call.WHO, [f"a loop makes {each} in the host's memory, {there}" for each in own], _RULE,
        f"{edit}, or let the policies of jax.checkpoint offload nothing.", "loops"))  # fmt: skip


def platform_of(mesh: Any) -> str:
    """The platform of a mesh's devices; of an abstract one, JAX's default."""
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
    return str(device.platform)
