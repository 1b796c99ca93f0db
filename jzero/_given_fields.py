# SPDX-License-Identifier: Apache-2.0
"""`GivenFields`: how groups of options and policies are printed, in messages too."""

from __future__ import annotations

import dataclasses
from typing import Any


class GivenFields:
    """Base of dataclasses that are printed with the fields that are not as by default."""

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [
            f"{x.name}={getattr(self, x.name)!r}"
            for x in fields
            if getattr(self, x.name) != x.default
        ]
        return f"{type(self).__name__}({', '.join(given)})"
