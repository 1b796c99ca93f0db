"""Programs compiled for H200s that are not there, each once: what is known rests in results/compiled.json.

One record is one program: its model, its devices and the step's options. A record is kept until it is
asked for again (`tables.py --again REGEX`), so an interruption loses one compilation, and a page is made in
seconds.
"""

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jzero

# Where jzero is installed without this repository, `experiments` is on no path.
sys.path.append(str(Path(__file__).parents[2]))
from experiments.shared import records
from experiments.shared.gpt import make_step
from model import AUTO_SPECS, GPT, tx

RESULTS = Path(__file__).with_name("results") / "compiled.json"
TARGET = "h200"
DEVICES_PER_HOST = 8
# XLA has a pass of its own that recomputes where a program exceeds the target's memory. Without it the bytes
# are those of the step as it is written, on a device of any size.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled; `str` of it is its name in the results.

    Attributes:
      gpt: the model.
      axes: names and sizes of the mesh's axes, hosts first; over 'model' each layer is divided.
      stage: of ZeRO.
      rows: sequences for each device and microbatch.
      microbatches, comm, shards: more of `shard_train_step`'s options; the last is its `axes`.
    """

    gpt: GPT
    axes: tuple[tuple[str, int], ...]
    stage: int
    rows: int = 1
    microbatches: jzero.Microbatches = jzero.Microbatches()
    comm: jzero.Comm = jzero.Comm()
    shards: jzero.Axes = jzero.Axes()

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.axes)
        given = {  # by the names that they have in the results
            "accumulate": self.microbatches.num if self.microbatches.num > 1 else None,
            "gather": self.comm.gather,
            "reduce": self.microbatches.reduce,
            "param_axes": ", ".join(self.shards.params or ()),
            "optimizer_axes": ", ".join(self.shards.optimizer or ()),
        }
        options = "".join(f", {name}={value}" for name, value in given.items() if value)
        return f"{self.gpt} | {axes} | rows {self.rows} | stage {self.stage}{options}"

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    @property
    def topology(self) -> str:
        per_host = min(DEVICES_PER_HOST, self.num_devices)
        return f"{self.num_devices // per_host}x{per_host}"

    def compile(self) -> dict[str, Any]:
        """Bytes on each device, and of what moves; `within` a step: at the peak, beside the arguments."""
        sizes = {name: size for name, size in self.axes if name != "model"}
        rows = self.rows * math.prod(sizes.values()) * self.microbatches.num
        specs = AUTO_SPECS if self.gpt.model_parallel else None
        axes = dataclasses.replace(self.shards, batch=tuple(sizes), auto_specs=specs)
        train_step = jzero.shard_train_step(
            make_step(self.gpt.loss, tx), stage=self.stage, microbatches=self.microbatches,
            comm=self.comm, axes=axes,
        )  # fmt: skip
        found = jzero.preflight(
            train_step, self.gpt.abstract_state(), self.gpt.batch(rows), target=TARGET,
            topology=self.topology, axes=dict(self.axes), compiler_options=COMPILER_OPTIONS,
        )  # fmt: skip
        assert found.report is not None
        return {
            "params": self.gpt.num_params,
            "at_rest": found.at_rest,
            "arguments": found.argument_bytes,
            "within": found.peak_bytes - found.argument_bytes,
            "peak": found.peak_bytes,
            "moved": _totals(found.schedule.collectives),
            "described": _totals(found.report.traffic),
            "described_elements": _totals(found.report.traffic, "total_elements"),
            "compile_seconds": round(found.compile_seconds, 1),
        }


@dataclasses.dataclass
class Compiled:
    """Records by the program's name; what is missing is compiled if that is allowed."""

    path: Path = RESULTS
    allowed: bool = False
    records: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            self.records = json.loads(self.path.read_text())

    def forget(self, pattern: str) -> None:
        """Drops the records whose name has the pattern."""
        kept = {name: r for name, r in self.records.items() if not re.search(pattern, name)}
        self.records = kept

    def __call__(self, program: Program) -> Mapping[str, Any]:
        name = str(program)
        if name not in self.records:
            if not self.allowed:
                raise LookupError(f"not compiled yet: {name}. Run make compile-tables")
            record = program.compile()
            self.records[name] = {**records.versions("jax", "optax"), **record}
            self._write()
            peak = record["peak"] / 1e9
            print(f"{record['compile_seconds']:5.0f} s, peak {peak:8.2f} GB: {name}", flush=True)
        return self.records[name]

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.records.items())]
        partial = self.path.with_suffix(".partial")
        partial.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        os.replace(partial, self.path)


def _totals(collectives: Any, what: str = "nbytes") -> dict[str, int]:
    """`{"all-gather over data": bytes}`."""
    totals: dict[str, int] = {}
    for c in collectives:
        key = f"{c.op} over {', '.join(c.axes)}"
        totals[key] = totals.get(key, 0) + getattr(c, what)
    return dict(sorted(totals.items()))
