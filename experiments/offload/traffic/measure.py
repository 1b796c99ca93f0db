"""What an offloaded step keeps where, and copies between devices and host, counted in the arrays themselves.

python experiments/offload/traffic/measure.py                       # make offload-traffic
python experiments/offload/traffic/measure.py --out /tmp/traffic

train_lm's model with bfloat16 parameters, float32 masters, AdamW and clipping at stage 3, on 1 and on 8
virtual CPU devices; then a model of 6.6B parameters on 64 devices that are not there, by describe() alone.
Writes <date>.json and .png, and prints the tables.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh

import jzero
from experiments.shared import pictures, records, training
from experiments.shared.devices import use_virtual_devices
from jzero.offload import _memory_updates
from jzero.offload.execute import _stream

HERE = Path(__file__).parent
common, train_linen = training.modules()

POLICIES = {
    "no offload": jzero.NoOffload(),
    "PinnedHost": jzero.PinnedHost(device_bytes=2**23),
    "HostCPU": jzero.HostCPU(),
    "HostCPU, ratio=0.5": jzero.HostCPU(ratio=0.5),
}
TO_HOST, TO_DEVICE = "to host", "to device"
LARGE = dict(num_layers=32, dim=4096, num_heads=32, context=2048, vocab_size=32_768)


def make_init() -> Callable[[], TrainState]:
    """Makes train_lm's state, of the size that it has now: bfloat16 parameters, masters in the optimizer."""
    # A new function: JAX remembers the shapes that an old one made.
    return train_linen.make_init(argparse.Namespace(steps=100, seed=0, bfloat16_params=True))


def num_params() -> int:
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(make_init()).params))


# -- counted in arrays -----------------------------------------------------------------------------


class Counter:
    """Counts arrays where they are.

    Attributes:
      num_bytes: that cross, of all devices, by direction; scalars apart, under their own names.
      buffers: bytes in which the host's new parameters wait to be sent.
    """

    def __init__(self) -> None:
        self.num_bytes: dict[str, int] = {}
        self.buffers = 0

    def clear(self) -> None:
        self.num_bytes.clear()
        self.buffers = 0

    def add(self, direction: str, arrays: Any, memory_kind: str) -> None:
        for x in jax.tree.leaves(arrays):
            if x.sharding.memory_kind == memory_kind:
                name = direction if x.size > 1 else f"{direction}, scalars"
                nbytes = sum(shard.data.nbytes for shard in x.addressable_shards)
                self.num_bytes[name] = self.num_bytes.get(name, 0) + nbytes


def watch(counter: Counter) -> None:
    """Counts what HostCPU and PinnedHost copy from now on, where they copy it."""
    engine, stream = _memory_updates.HostEngine, _stream.stream

    class Watched(engine):  # type: ignore[misc, valid-type]
        def prepare(self, state: Any, reads: Any) -> None:
            counter.add(TO_HOST, reads, "pinned_host")
            counter.buffers = sum(held(outputs.arrays)[1] for outputs in self._sets)
            super().prepare(state, reads)

        def run(self) -> Iterator[Any]:
            for chunk in super().run():
                counter.add(TO_DEVICE, chunk, "device")
                yield chunk

    def counted(direction: str, memory_kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            arrays = run(*args)
            moved = [*arrays.values()] if isinstance(arrays, dict) else arrays
            counter.add(direction, moved, memory_kind)
            return arrays

        return counting

    def watched_stream(visits: Any, device_bytes: int, under_way: int | None = None) -> None:
        stream(
            (
                visit._replace(
                    fetch=counted(TO_DEVICE, "device", visit.fetch),
                    update=counted(TO_HOST, "pinned_host", visit.update),
                )
                for visit in visits
            ),
            device_bytes,
            under_way,
        )

    vars(_memory_updates)["HostEngine"], vars(_stream)["stream"] = Watched, watched_stream


def held(tree: Any) -> tuple[int, int]:
    """Bytes of a tree in the memory of all devices, and in that of their host."""
    on_devices = on_host = 0
    for leaf in jax.tree.leaves(tree):
        if getattr(leaf, "where", "") == "in host memory":
            on_host += sum(buffer.nbytes for buffer in leaf.storage.buffers)
            continue
        array = leaf.storage if isinstance(leaf, jzero.LeafArray) else leaf
        nbytes = sum(shard.data.nbytes for shard in array.addressable_shards)
        if array.sharding.memory_kind == "device":
            on_devices += nbytes
        else:
            on_host += nbytes
    return on_devices, on_host


def measured(policy: Any, num_devices: int, counter: Counter) -> dict[str, Any]:
    """Bytes of all devices after two steps, and those that the second step copied."""
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    # All leaves are sharded, so that bytes can be compared with formulas.
    axes = jzero.Axes(min_shard_bytes=0)
    step = jzero.shard_train_step(
        train_linen.train_step, stage=3, memory=policy, axes=axes, mesh=mesh
    )
    batch = np.zeros((8, common.context + 1), np.uint8)
    state = step.init(make_init())
    said = said_by(step, state, batch, num_devices)
    for _ in range(2):
        counter.clear()
        state, _ = step(state, batch)
    params, others = held(state.params), held((state.step, state.opt_state))
    assert params[1] == 0
    transferred = {name: counter.num_bytes.get(name, 0) for name in (TO_HOST, TO_DEVICE)}
    found = {"parameter": params[0], "optimizer state": others[0], "on its host": others[1]}
    scalars = {k: v for k, v in counter.num_bytes.items() if k not in transferred}
    # Gradients come to memory of the host, too.
    buffers = counter.buffers + transferred[TO_HOST] if counter.buffers else 0
    return {
        "measured": found | transferred, "describe": said, "scalars": scalars, "buffers": buffers,
    }  # fmt: skip


# -- said by describe() ----------------------------------------------------------------------------


def said_by(step: Any, state: Any, batch: Any, num_devices: int) -> dict[str, int]:
    """The same, of all devices."""
    report = step.describe(state, batch)
    found = {row.role: row.per_device for row in report.memory}
    found |= {"on its host": sum(row.on_host for row in report.memory), TO_HOST: 0, TO_DEVICE: 0}
    for transferred in report.transfers:
        if transferred.elements > 1:
            found[transferred.direction] += transferred.nbytes
    return {name: num * num_devices for name, num in found.items()}


def planned(policy: Any, num_devices: int) -> dict[str, Any]:
    """The large model, on devices that are not there."""
    mesh = AbstractMesh((num_devices,), ("data",))
    step = jzero.shard_train_step(train_linen.train_step, stage=3, memory=policy, mesh=mesh)
    batch = jax.ShapeDtypeStruct((num_devices, common.context + 1), jnp.uint8)
    return {"describe": said_by(step, jax.eval_shape(make_init()), batch, num_devices)}


# -- tables and picture ----------------------------------------------------------------------------

COLUMNS = ("parameter", "optimizer state", "on its host", TO_HOST, TO_DEVICE)


def per_parameter(cell: dict[str, Any]) -> dict[str, float]:
    """Bytes; counted ones if there are any. A device holds as many for each parameter of its shard."""
    numbers = cell.get("measured", cell["describe"])
    return {name: numbers.get(name, 0) / cell["params"] for name in COLUMNS}


def table(cells: list[dict[str, Any]]) -> str:
    """In Markdown, in bytes per parameter."""
    header = ["", "devices", "parameters", "optimizer state", "with all gradients", "state on host",
              "buffers on host", "to host", "to device"]  # fmt: skip
    lines = [header, ["---"] * len(header)]
    for cell in cells:
        found = per_parameter(cell)
        params, optimizer, *others = (found[name] for name in COLUMNS)
        gradients = params + optimizer + 2  # bfloat16, in shards; they are alive within a step
        shown = [f"{x:.2f}" for x in (params, optimizer, gradients, *others)]
        buffers = f"{cell['buffers'] / cell['params']:.2f}" if cell.get("buffers") else ""
        lines.append([cell["policy"], str(cell["devices"]), *shown[:4], buffers, *shown[4:]])
    lines.append(
        ["*ZeRO-Offload, the paper*", "", "2", "0", "2, and a buffer", "12", "2", "2", "2"]
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(path: Path, cells: list[dict[str, Any]]) -> None:
    """Bytes per parameter at rest and per step, of the cells of one number of devices."""
    names = [cell["policy"] for cell in cells]
    found = [per_parameter(cell) for cell in cells]
    with pictures.drawn(path, 1, 2, font=12, figsize=(11, 4.2)) as (_, (left, right)):
        ys, start = np.arange(len(cells)), np.zeros(len(cells))
        parts = [
            ("parameters, on the devices", "parameter", "#0d47a1"),
            ("optimizer state, on the devices", "optimizer state", "#90caf9"),
            ("optimizer state, on the host", "on its host", "#ffcc80"),
        ]
        for label, column, color in parts:
            widths = np.array([x[column] for x in found])
            left.barh(ys, widths, left=start, color=color, label=label)
            start += widths
        for offset, column, color in [(-0.2, TO_HOST, "#e65100"), (0.2, TO_DEVICE, "#2e7d32")]:
            widths = np.array([x[column] for x in found])
            bars = right.barh(ys + offset, widths, height=0.38, color=color, label=column)
            right.bar_label(bars, fmt=" %.2f")
        left.set(xlabel="bytes per parameter at rest", yticks=ys, yticklabels=names)
        right.set(xlabel="bytes per parameter and step", yticks=ys, yticklabels=[""] * len(ys))
        right.margins(x=0.12)
        for axes in (left, right):
            axes.invert_yaxis()
            axes.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, 1.28))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    use_virtual_devices(8)
    watch(counter := Counter())
    cells: list[dict[str, Any]] = []
    for num_devices in (1, 8):
        for name, policy in POLICIES.items():
            cell = measured(policy, num_devices, counter)
            cells.append({"policy": name, "devices": num_devices, "params": num_params()} | cell)
    vars(common).update(LARGE)
    for name in ("no offload", "PinnedHost", "HostCPU"):
        cell = planned(POLICIES[name], 64)
        cells.append({"policy": name, "devices": 64, "params": num_params()} | cell)
    result = {**common.environment(8), "large": LARGE, "cells": cells}
    stem = args.out / result["date"]
    records.write(stem.with_suffix(".json"), result)
    plot(stem.with_suffix(".png"), [cell for cell in cells if cell["devices"] == 8])
    print(table(cells))
    for cell in cells:
        if cell.get("measured", cell["describe"]) != cell["describe"]:
            print(f"describe() differs: {cell}")


if __name__ == "__main__":
    main()
