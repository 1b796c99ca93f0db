"""Steps of models so small that every leaf is below the default byte floor; options by single names.

Tables and samplers of options draw each option by itself; `grouped` puts them into jzero's groups, by the
names that they had in jzero 0.x.
"""

import dataclasses
from typing import Any

import jzero
from jzero._groups import GROUPS
from jzero._moved_options import MOVED


def grouped(**options: Any) -> dict[str, Any]:
    """`accumulate=2, reduce="once"` as `microbatches=jzero.Microbatches(2, reduce="once")`."""
    found = dict[str, Any]()
    groups = dict[str, dict[str, Any]]()
    for name, value in options.items():
        option, _, field = MOVED.get(name, name).partition(".")
        if name not in MOVED or name == "mesh":
            found[name] = value
        elif not field:
            if value is not None and (value != () or name != "state_argnames"):
                found[option] = value
        elif name == "layer_major":
            groups.setdefault("microbatches", {})["order"] = "layer" if value else "microbatch"
        elif option != "memory" or value is not None:
            groups.setdefault(option, {})[field] = value
    return found | {option: GROUPS[option].kind(**fields) for option, fields in groups.items()}


def _shard_train_step(step_fn: Any = None, **options: Any) -> Any:
    """`jzero.shard_train_step` with the options by single names, and leaves of any size in shards."""
    options = grouped(**options)
    axes = options.get("axes")
    if not isinstance(axes, jzero.Axes):
        axes = jzero.Axes(axes, min_shard_bytes=0)
    elif axes.min_shard_bytes is None:
        axes = dataclasses.replace(axes, min_shard_bytes=0)
    return jzero.shard_train_step(step_fn, **options | {"axes": axes})


# Any: tests look into a step, where not everything has a type.
shard_train_step: Any = _shard_train_step
