# SPDX-License-Identifier: Apache-2.0
"""Options that neither `shard_train_step` nor `shard_eval_step` has: what to write instead."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from jzero._errors import OptionError, message

_Function = TypeVar("_Function", bound=Callable[..., Any])

_DONATES = "A train step donates its state by itself (donate=False keeps it), an evaluation nothing: drop it."
_OF_JIT = "jzero compiles the step itself: drop it."
_AXES = "Write axis_names=, the data axes of the mesh."
_NUM_MICROBATCHES = "Write accumulate=, the microbatches of each device in a step."
# By the names that they have in JAX and DeepSpeed, and what people write: which option does it, and how.
_KNOWN = {
    "donate_argnums": (None, _DONATES),
    "donate_argnames": (None, _DONATES),
    "in_shardings": (
        "in_specs",
        "Drop it: rows are split along dim 0, and the state as the stage says. Where an argument has its "
        "rows elsewhere, write in_specs={'argument': jax.P(None, 'data')}.",
    ),
    "out_shardings": (None, "Drop it: the state comes back as it rests, and rows stay split."),
    "in_axes": (
        "in_specs",
        "Write in_specs={'argument': jax.P(None, 'data')} for rows along dim 1.",
    ),
    "out_axes": (None, "Drop it: what has rows comes back whole, in their order."),
    "zero_stage": ("stage", "Write stage=."),
    "zero": ("stage", "Write stage=."),
    "level": ("stage", "Write stage=."),
    "devices": ("mesh", "Write mesh=jax.make_mesh((len(devices),), ('data',), devices=devices)."),
    "num_devices": ("mesh", "Write mesh=jax.make_mesh((num_devices,), ('data',))."),
    "mesh_axes": ("axis_names", _AXES),
    "mesh_axis": ("axis_names", _AXES),
    "data_axis": ("axis_names", _AXES),
    "axis": ("axis_names", _AXES),
    "gradient_accumulation_steps": ("accumulate", _NUM_MICROBATCHES),
    "grad_accum": ("accumulate", _NUM_MICROBATCHES),
    "microbatches": ("accumulate", _NUM_MICROBATCHES),
    "offload_optimizer": ("offload", "Write offload=jzero.PinnedHost(...) or jzero.HostCPU()."),
    "keep_unused": (None, _OF_JIT),
    "inline": (None, _OF_JIT),
    "device": (None, _OF_JIT),
    "backend": (None, _OF_JIT),
}


def refuses_unknown_options(fn: _Function) -> _Function:
    """`fn(step, *, option=...)`, which says of an option that it does not have what to write instead."""
    parameters = inspect.signature(fn).parameters.values()
    options = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    (step,) = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]
    known = {step, *options}
    who = fn.__name__

    def decorator(make: Callable[[Any], Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                raise OptionError(message(
                    who, f"it was called without {step}, and its result with {len(args) + len(kwargs)} "
                    f"arguments", "Without a step it is a decorator of one.",
                    f"Write {who}({step}, {options[0]}=...), and call what that returns."))  # fmt: skip
            return make(*args)

        return made

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            raise OptionError(message(
                who, f"{len(args)} arguments by position, the second a {type(args[1]).__name__}",
                "Only the step is given by position, and options by their names.",
                f"Write {who}({step}, {options[0]}=...)."))  # fmt: skip
        if bad := [name for name in kwargs if name not in known]:
            edits = dict[str, list[str]]()
            for name in bad:
                edits.setdefault(_edit(who, name, options), []).append(f"{name}=")
            lines = [
                f"Of {', '.join(of)}: {edit}" if len(edits) > 1 else edit
                for edit, of in edits.items()
            ]
            raise OptionError(message(
                who, f"there is no option {', '.join(f'{name}=' for name in bad)}", " ".join(lines),
                ""))  # fmt: skip
        made = fn(*args, **kwargs)
        return made if args or kwargs.get(step) is not None else decorator(made)

    return called  # type: ignore[return-value]


def _edit(who: str, name: str, options: list[str]) -> str:
    """What to write for an option that is not there."""
    option, edit = _KNOWN.get(name, (None, ""))
    if edit and option in (None, *options):
        return edit
    near = difflib.get_close_matches(name, options, 1)
    return f"Did you mean {near[0]}=?" if near else f"Drop it: help(jzero.{who}) lists the options."
