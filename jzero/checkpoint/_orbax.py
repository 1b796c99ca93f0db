# SPDX-License-Identifier: Apache-2.0
"""What readers of Orbax checkpoints find beside the leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

STATE, DATA = "state", "data"  # The items of our checkpoints; a state alone is Orbax's "default".
TREE = "_METADATA"  # The file that every Orbax checkpoint of a pytree has.
NOTES = "_CHECKPOINT_METADATA"  # What Orbax says of a checkpoint, or of all items of a step.
ITERATOR_FILE = "metadata"  # The only file of an item that is JSON.


# What Orbax calls its handlers of items.
PYTREE, JSON = (
    f"{handler.__module__}.{handler.__qualname__}"
    for handler in (ocp.PyTreeCheckpointHandler, ocp.JsonCheckpointHandler)
)


def write_notes(
    directory: Path, handlers: str | dict[str, str], started: int, custom: dict[str, Any]
) -> None:
    """Writes what Orbax says of a checkpoint, or of all items of a step.

    Args:
      directory: of the checkpoint, or the step.
      handlers: of the checkpoint, or of each item.
      started: when it was begun, in nanoseconds since the epoch.
      custom: what its writer says of it.
    """
    notes = {
        "item_handlers": handlers, "metrics": {}, "performance_metrics": {},
        "init_timestamp_nsecs": started, "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": custom,
    }  # fmt: skip
    (directory / NOTES).write_text(json.dumps(notes))
