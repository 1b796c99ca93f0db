# SPDX-License-Identifier: Apache-2.0
"""`Options` from groups or their short forms."""

from __future__ import annotations

from typing import Any

from jzero._option_groups import axes_of, comm_of, microbatches_of
from jzero._policy import memory_of
from jzero.offload._backends import backend_of
from jzero.sharding.plan._options import Options


def options_of(
    who: str, stage: Any, microbatches: Any, memory: Any, comm: Any, axes: Any, **more: Any
) -> Options:
    return Options(
        stage, microbatches_of(who, microbatches), comm_of(who, comm), axes_of(axes),
        offload=backend_of(who, memory_of(who, memory)), who=who, **more,
    )  # fmt: skip
