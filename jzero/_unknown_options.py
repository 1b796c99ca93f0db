# SPDX-License-Identifier: Apache-2.0
"""Messages about options that do not exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jzero._errors import OptionError, message
from jzero._moved_options import MOVED, new_line

_Function = TypeVar("_Function", bound=Callable[..., Any])


# Names that JAX and DeepSpeed have, and that people write: the option, and what to write.
_KNOWN: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(("donate_argnums", "donate_argnames"), (None, "A train step donates its state "
        "(donate=False keeps it), an evaluation donates nothing: drop it.")),
    "in_shardings": ("in_specs", "Drop it: arguments are sharded along dim 0, and the state as the stage "
        "says. Where an argument has its rows along another dim, write in_specs={'argument': jax.P(None, "
        "'data')}."),
    "out_shardings": (None, "Drop it: the state is returned as it is stored, and outputs with rows stay "
        "batch-sharded."),
    "in_axes": ("in_specs", "Write in_specs={'argument': jax.P(None, 'data')} for rows along dim 1."),
    "out_axes": (None, "Drop it: outputs with rows are global arrays, in the order of the rows."),
    **dict.fromkeys(("zero_stage", "zero", "level"), ("stage", "Write stage=.")),
    "devices": ("mesh", "Write mesh=jax.make_mesh((len(devices),), ('data',), devices=devices)."),
    "num_devices": ("mesh", "Write mesh=jax.make_mesh((num_devices,), ('data',))."),
    **dict.fromkeys(("mesh_axes", "mesh_axis", "data_axis", "axis"), ("axes", "Write axes=, the data axes of "
        "the mesh.")),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), ("microbatches", "Write microbatches=, "
        "how many each device works through in a step.")),
    "offload_optimizer": ("memory", "Write memory=jzero.PinnedHost(...) or jzero.HostCPU()."),
    **dict.fromkeys(("keep_unused", "inline", "device", "backend"), (None, "jzero compiles the step itself: "
        "drop it.")),
}  # fmt: skip


def refuses_unknown_options(fn: _Function) -> _Function:
    """Decorates `fn(step, *, option=...)`: messages about unknown options say what to write instead.

    If `fn` accepts None as the step, it is then a decorator of one.
    """
    parameters = inspect.signature(fn).parameters.values()
    options = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    ((first, default),) = [(p.name, p.default) for p in parameters if p.kind != p.KEYWORD_ONLY]
    who = fn.__name__

    def decorator(make: Callable[[Any], Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if len(args) != 1 or kwargs:
                raise OptionError(message(
                    who, f"it was called without {first}, and its result with {len(args) + len(kwargs)} "
                    f"arguments", "Without a step it is a decorator of one.",
                    f"Write {who}({first}, {options[0]}=...), and call what that returns."))  # fmt: skip
            return make(*args)

        return made

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            raise OptionError(message(
                who, f"{len(args)} arguments by position, the second a {type(args[1]).__name__}",
                f"Only {first} is passed by position; options are passed by name.",
                f"Write {who}({first}, {options[0]}=...)."))  # fmt: skip
        unknown = {name: x for name, x in kwargs.items() if name not in (first, *options)}
        if unknown:
            names = ", ".join(f"{name}=" for name in unknown)
            edit = " ".join(_edits(who, unknown, kwargs, (first, *options)))
            raise OptionError(message(who, f"there is no option {names}", edit, ""))
        made = fn(*args, **kwargs)
        if args or default is not None or kwargs.get(first) is not None:
            return made
        return decorator(made)

    return called  # type: ignore[return-value]


def _edits(
    who: str, unknown: Mapping[str, Any], given: Mapping[str, Any], options: Sequence[str]
) -> list[str]:
    """The edits of a message: one for all options of jzero 0.x, and one for each other option."""
    moved = [name for name in unknown if name in MOVED and MOVED[name].partition(".")[0] in options]
    edits = [new_line(moved, given)] if moved else []
    others = dict[str, list[str]]()
    for name in unknown:
        if name not in moved:
            others.setdefault(_edit(who, name, options), []).append(f"{name}=")
    for edit, of in others.items():
        edits.append(f"For {', '.join(of)}: {edit}" if len(others) + len(edits) > 1 else edit)
    return edits


def _edit(who: str, name: str, options: Sequence[str]) -> str:
    """The edit for an option that never existed."""
    option, edit = _KNOWN.get(name, (None, ""))
    if edit and option in (None, *options):
        return edit
    near = difflib.get_close_matches(name, options, 1)
    return f"Did you mean {near[0]}=?" if near else f"Drop it: help(jzero.{who}) lists the options."
