# SPDX-License-Identifier: Apache-2.0
"""Options that a function of jzero's does not have: what to write instead."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jzero._errors import OptionError, message

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Moved(NamedTuple):
    """Where an option of jzero 0.x has gone: a field of a group, or another name."""

    option: str
    group: str = ""
    field: str = ""


# The options of jzero 0.x, for one release. [docs/migrate/options.md]
_MOVED = {
    "accumulate": _Moved("microbatches", "Microbatches", "num"),
    "reduce": _Moved("microbatches", "Microbatches", "reduce"),
    "accumulate_dtype": _Moved("microbatches", "Microbatches", "dtype"),
    "layer_major": _Moved("microbatches", "Microbatches", "order"),
    **{
        name: _Moved("comm", "Comm", name)
        for name in ("gather_dtype", "reduce_dtype", "gather", "prefetch_bytes", "tile_bytes",
                     "max_gather_bytes")
    },
    "axis_names": _Moved("axes", "Axes", "batch"),
    "param_axes": _Moved("axes", "Axes", "params"),
    "optimizer_axes": _Moved("axes", "Axes", "optimizer"),
    "full": _Moved("axes", "Axes", "replicate"),
    **{
        name: _Moved("axes", "Axes", name)
        for name in ("axis_name", "auto_specs", "min_shard_bytes")
    },
    "offload": _Moved("memory", "Memory", "optimizer"),
    "offload_params": _Moved("memory", "Memory", "params"),
    "offload_activations": _Moved("memory", "Memory", "activations"),
    "state_argnums": _Moved("state"),
    "state_argnames": _Moved("state"),
    "num_params": _Moved("model"),
    "config": _Moved("model"),
    "mesh": _Moved("devices"),
    "param_bytes": _Moved("bytes_per_param", "BytesPerParam", "params"),
    "gradient_bytes": _Moved("bytes_per_param", "BytesPerParam", "gradients"),
    "optimizer_bytes": _Moved("bytes_per_param", "BytesPerParam", "optimizer"),
    **{
        name: _Moved("workload", "Workload", name)
        for name in ("tokens", "layers", "width", "recompute")
    },
    **{
        name: _Moved("rates", "Rates", name)
        for name in ("peak", "pcie", "interconnect", "host_update", "disk")
    },
}  # fmt: skip
# What one value alone of a group is written as.
_SHORT = {"Microbatches": "num", "Axes": "batch", "Memory": "optimizer"}
_FIRST = {"Microbatches": "num", "Axes": "batch"}  # fields that are given by position

_DONATES = "A train step donates its state (donate=False keeps it), an evaluation donates nothing: drop it."
_OF_JIT = "jzero compiles the step itself: drop it."
_AXES = "Write axes=, the data axes of the mesh."
_NUM_MICROBATCHES = "Write microbatches=, how many each device works through in a step."
# By the names that they have in JAX and DeepSpeed, and what people write: which option does it, and how.
_KNOWN = {
    "donate_argnums": (None, _DONATES),
    "donate_argnames": (None, _DONATES),
    "in_shardings": (
        "in_specs",
        "Drop it: arguments are sharded along dim 0, and the state as the stage says. Where an argument has "
        "its rows along another dim, write in_specs={'argument': jax.P(None, 'data')}.",
    ),
    "out_shardings": (
        None,
        "Drop it: the state is returned as it is stored, and outputs with rows stay batch-sharded.",
    ),
    "in_axes": (
        "in_specs",
        "Write in_specs={'argument': jax.P(None, 'data')} for rows along dim 1.",
    ),
    "out_axes": (None, "Drop it: outputs with rows are global arrays, in the order of the rows."),
    "zero_stage": ("stage", "Write stage=."),
    "zero": ("stage", "Write stage=."),
    "level": ("stage", "Write stage=."),
    "devices": ("mesh", "Write mesh=jax.make_mesh((len(devices),), ('data',), devices=devices)."),
    "num_devices": ("mesh", "Write mesh=jax.make_mesh((num_devices,), ('data',))."),
    "mesh_axes": ("axes", _AXES),
    "mesh_axis": ("axes", _AXES),
    "data_axis": ("axes", _AXES),
    "axis": ("axes", _AXES),
    "gradient_accumulation_steps": ("microbatches", _NUM_MICROBATCHES),
    "grad_accum": ("microbatches", _NUM_MICROBATCHES),
    "offload_optimizer": ("memory", "Write memory=jzero.PinnedHost(...) or jzero.HostCPU()."),
    "keep_unused": (None, _OF_JIT),
    "inline": (None, _OF_JIT),
    "device": (None, _OF_JIT),
    "backend": (None, _OF_JIT),
}


def refuses_unknown_options(fn: _Function) -> _Function:
    """`fn(step, *, option=...)`, which says of an option that it does not have what to write instead.

    Without a step it is a decorator of one, if `fn` takes None for it.
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
    """What to write for options that are not there: one line for those of jzero 0.x, one for each other."""
    moved = {
        name: _MOVED[name] for name in unknown if name in _MOVED and _MOVED[name].option in options
    }
    edits = [f"Write {', '.join(_new(moved, given))}."] if moved else []
    others = dict[str, list[str]]()
    for name in unknown:
        if name not in moved:
            others.setdefault(_edit(who, name, options), []).append(f"{name}=")
    for edit, of in others.items():
        edits.append(f"For {', '.join(of)}: {edit}" if len(others) + len(edits) > 1 else edit)
    return edits


def _new(moved: Mapping[str, _Moved], given: Mapping[str, Any]) -> list[str]:
    """`microbatches=jzero.Microbatches(4, reduce='once')`: the new line for old options."""
    groups = dict[str, list[str]]()
    for name in moved:
        groups.setdefault(moved[name].option, []).append(name)
    lines = []
    for option, names in groups.items():
        group = moved[names[0]].group
        fields = {moved[name].field: _value(name, given[name]) for name in names}
        if not group:
            lines.append(f"{option}={' + '.join(fields.values())}")
        elif [*fields] == [_SHORT.get(group)]:
            lines.append(f"{option}={next(iter(fields.values()))}")
        else:
            first = fields.pop(_FIRST.get(group, ""), None)
            written = [
                *([] if first is None else [first]),
                *(f"{k}={x}" for k, x in fields.items()),
            ]
            lines.append(f"{option}=jzero.{group}({', '.join(written)})")
    return lines


def _value(name: str, value: Any) -> str:
    """An old option's value, as the new one takes it."""
    if name == "layer_major":
        return repr("layer" if value else "microbatch")
    if type(value).__module__.startswith("jzero.") and dataclasses.is_dataclass(value):
        given = [
            f"{x.name}={getattr(value, x.name)!r}"
            for x in dataclasses.fields(value)
            if getattr(value, x.name) != x.default
        ]
        return f"jzero.{type(value).__name__}({', '.join(given)})"
    # A dtype, as jnp.bfloat16 is.
    return (
        f"jnp.{value.__name__}"
        if hasattr(value, "dtype") and hasattr(value, "__name__")
        else repr(value)
    )


def _edit(who: str, name: str, options: Sequence[str]) -> str:
    """What to write for an option that never was there."""
    option, edit = _KNOWN.get(name, (None, ""))
    if edit and option in (None, *options):
        return edit
    near = difflib.get_close_matches(name, options, 1)
    return f"Did you mean {near[0]}=?" if near else f"Drop it: help(jzero.{who}) lists the options."
