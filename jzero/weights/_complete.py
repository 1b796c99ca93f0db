# SPDX-License-Identifier: Apache-2.0
"""Whether tensors are all those of a model, by its config.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jzero._errors import CheckpointError, message
from jzero.reports._hf_config import ModelPart, read_model
from jzero.weights._layout import TensorShape, WeightLayout


def check(
    who: str, path: Any, layout: WeightLayout, tensors: Mapping[str, TensorShape], config: Any
) -> None:
    """That a model of this configuration has these tensors, and no others.

    Raises:
      CheckpointError: those that are missing, left over, or of another shape.
    """
    parts = _parts(config)
    seen: dict[tuple[int, str], int] = {}
    bad = []
    of_rules, _ = layout.match_tensors(tensors)
    for name in dict.fromkeys(name for found in of_rules for name in found.values()):
        if (found := _find(name, layout, parts)) is None:
            bad.append(f"tensor {name} is left over: config has none")
            continue
        at, key = found
        seen[at, key] = seen.get((at, key), 0) + 1
        if (shape := parts[at].shapes[key]) != tensors[name]:
            bad.append(f"tensor {name} is {list(tensors[name])}, and config says {list(shape)}")
    for at, part in enumerate(parts):
        for key in part.shapes:
            if (num := seen.get((at, key), 0)) != part.num:
                bad.append(
                    f"there are {num} of the tensor {part.name}.{key}, and config says {part.num}"
                )
    if bad:
        raise CheckpointError(message(
            f"{who} {path}", bad, "A model has the tensors that its config.json says.",
            "Name its own config.json, or leave config out.", "tensors", shown=20))  # fmt: skip


def tied(
    layout: WeightLayout, tensors: Mapping[str, TensorShape], config: Any
) -> list[tuple[str, str]]:
    """Pairs of tensors, of which a model of this configuration has only the first, for both."""
    parts, (found, _) = _parts(config), layout.match_tensors(tensors)
    of_rules = dict(zip((rule.tensors for rule in layout.rules), found, strict=True))
    return [
        (first, second)
        for rule in layout.rules if rule.tied
        for first in of_rules[rule.tied].values()
        for second in of_rules[rule.tensors].values() if _find(second, layout, parts) is None
    ]  # fmt: skip


def expected(layout: WeightLayout, config: Any) -> Any:
    """What knows the shape of a tensor by its name; None where it does not."""
    parts = [] if config is None else _parts(config)

    def shape(name: str) -> TensorShape | None:
        found = _find(name, layout, parts)
        return None if found is None else parts[found[0]].shapes[found[1]]

    return shape


def _parts(config: Any) -> list[ModelPart]:
    return list(read_model(config).parts)


def _find(
    name: str, layout: WeightLayout, parts: list[ModelPart]
) -> tuple[int, str] | None:  # fmt: skip
    """The part that has a tensor, and what it is called there: the last of its own name."""
    name = name.removeprefix(layout.base)
    in_layer = re.fullmatch(r"\w+\.[0-9]+\.(.*)", name)
    for at, part in enumerate(parts):
        for key in part.shapes:
            if part.name.endswith("layers"):
                if in_layer and f".{in_layer[1]}".endswith(f".{key}"):
                    return at, key
            elif not in_layer and name == f"{part.name}.{key}".lstrip("."):
                return at, key
    return None
