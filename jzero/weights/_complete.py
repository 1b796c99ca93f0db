# SPDX-License-Identifier: Apache-2.0
"""The tensors that a model has, by its config.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jzero._errors import CheckpointError, message
from jzero.reports._hf_config import ModelPart, read_model
from jzero.weights._layout import TensorShape, WeightLayout


class Expected:
    """The tensors of a model by its config.json; knows nothing if the configuration is None."""

    def __init__(self, who: str, layout: WeightLayout, config: Any):
        self._layout, self._parts, self.head_dim = layout, tuple[ModelPart, ...](), None
        if config is not None:
            model = read_model(config, who, "Correct it, or leave config out.")
            self._parts, self.head_dim = model.parts, model.head_dim

    def shape(self, name: str) -> TensorShape | None:
        """The shape of a tensor; None if the model has no tensor of this name."""
        found = self._find(name)
        return None if found is None else self._parts[found[0]].shapes[found[1]]

    def check(self, who: str, tensors: Mapping[str, TensorShape]) -> None:
        """Refuses other tensors than the model's."""
        if not self._parts:
            return
        matched = self._layout.match_tensors(tensors).found
        names = dict.fromkeys(name for found in matched for name in found.values())
        bad = []
        for name in names:
            if (shape := self.shape(name)) is None:
                bad.append(f"tensor {name} is left over: config has none")
            elif shape != tensors[name]:
                bad.append(f"tensor {name} is {list(tensors[name])}, and config says {list(shape)}")
        seen = Counter(map(self._find, names))
        bad += [
            f"there are {seen[at, key]} of the tensor {part.name}.{key}, and config says {part.num}"
            for at, part in enumerate(self._parts) for key in part.shapes
            if seen[at, key] != part.num
        ]  # fmt: skip
        if bad:
            raise CheckpointError(message(
                who, bad, "A model has the tensors that its config.json says.",
                "Name its own config.json, or leave config out.", "tensors"))  # fmt: skip

    def lacks(self, names: Iterable[str]) -> bool:
        return bool(self._parts) and None in map(self._find, names)

    def _find(self, name: str) -> tuple[int, str] | None:
        """The index of the part that has a tensor, and its name there."""
        name = name.removeprefix(self._layout.base)
        in_layer = re.fullmatch(r"\w+\.[0-9]+\.(.*)", name)
        for at, part in enumerate(self._parts):
            for key in part.shapes:
                if part.name.endswith("layers"):
                    if in_layer and f".{in_layer[1]}".endswith(f".{key}"):
                        return at, key
                elif not in_layer and name == f"{part.name}.{key}".lstrip("."):
                    return at, key
        return None
