"""How large a model trains on how many nodes, by where its state rests: from numbers, beside the paper's.

python experiments/infinity/largest.py                 # prints the tables, writes <date>-largest.json

`jzero.estimate` for nodes as ZeRO-Infinity has them: 16 V100s of 32 GB, 1.5 TB of memory and 28 TB of NVMe.
Nothing runs. Its numbers are model states; activations, temporary buffers and the operating system are not in
them. The paper's are quoted without its page at hand: its Figures 1, 2 and 6a, section 3, and the abstract.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jzero
from experiments.shared import records
from jzero._quantities import readable_count, readable_seconds, readable_size

# ---------------------------------------------------------------------------------------------
GPUS, GPU, HOST, DISK = 16, 32 * 10**9, 1500 * 10**9, 28 * 10**12  # of a node
NODES = (1, 4, 16, 32, 64, 96)
# Bytes of parameters on a device; of each kind of buffer in a process.
WINDOW, BUFFERS = 2**32, 2**30
FILES = jzero.NVMe("nvme", host_bytes=BUFFERS)
PARAMS_IN_FILES = jzero.NVMe("nvme", host_bytes=BUFFERS, device_bytes=WINDOW)


def all_in_files(in_place: bool) -> jzero.Memory:
    """Parameters, gradients and optimizer state."""
    both: dict[str, Any] = dict(host_bytes=BUFFERS, in_place=in_place, gradients=True)
    params = jzero.NVMe("nvme", device_bytes=WINDOW, **both)
    return jzero.Memory(params=params, optimizer=jzero.NVMe("nvme", **both))


PINNED = jzero.PinnedHost(WINDOW)
TOKENS = jzero.Workload(tokens="32K")
# What a node's share of its links and disks does for each device, as the paper measures them.
RATES = jzero.Rates(peak="70TFLOP/s", pcie="3GB/s", disk="1.6GB/s", host_update="3GB/s")
# ---------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """Where model states rest, and what the paper trains so on one node."""

    name: str
    stage: int = 3
    memory: jzero.Memory = jzero.Memory()
    paper: str = ""


WAYS = (
    Way("jax.jit on each device", stage=0, paper="1.4B (data parallel)"),
    Way("stage 2, state updated by the hosts", 2, jzero.Memory(optimizer=jzero.HostCPU()),
        "13B (ZeRO-Offload)"),
    Way("stage 3", paper="20B (ZeRO-3, 3D parallelism)"),
    Way("stage 3, state on the hosts", 3, jzero.Memory(optimizer=jzero.HostCPU())),
    Way("and parameters on the hosts", 3, jzero.Memory(params=PINNED, optimizer=jzero.HostCPU()),
        "almost 100B (Infinity, CPU)"),
    Way("state in files, parameters on the hosts", 3, jzero.Memory(params=PINNED, optimizer=FILES)),
    Way("both in files", 3, jzero.Memory(params=PARAMS_IN_FILES, optimizer=FILES)),
    Way("and gradients in files", 3, all_in_files(in_place=False), "1T (Infinity, NVMe)"),
    Way("the same, in place", 3, all_in_files(in_place=True)),
)  # fmt: skip
ON_DEVICES, ON_HOSTS, IN_FILES = WAYS[2], WAYS[4], WAYS[7]


class Model(NamedTuple):
    """One of the paper's Figure 2a; its model states take 20 bytes a parameter."""

    layers: int
    hidden: int
    paper_tib: float

    @property
    def num_params(self) -> int:
        return 12 * self.layers * self.hidden**2

    @property
    def layer_bytes(self) -> int:
        """Of a layer, gathered, in 16 bits."""
        return 2 * 12 * self.hidden**2


MODELS = (
    Model(80, 10240, 1.83), Model(100, 20480, 9.16), Model(128, 25600, 18.31),
    Model(195, 65536, 182.81), Model(315, 163840, 1845.70),
)  # fmt: skip


def estimated(num_params: int, nodes: int, way: Way, **more: Any) -> Any:
    return jzero.estimate(
        num_params, devices=GPUS * nodes, stage=way.stage, memory=way.memory, **more
    )


def largest(nodes: int, way: Way) -> int:
    """The most parameters that fit into devices, hosts and disks of so many nodes."""
    return int(estimated(1, nodes, way).largest_model(GPU, HOST // GPUS, DISK // GPUS))


def bound(nodes: int, way: Way) -> str:
    """What is full first: a tenth more has no room there."""
    found = estimated(largest(nodes, way) * 11 // 10, nodes, way)
    full = {
        "devices": found.total > GPU,
        "hosts": found.on_host > HOST // GPUS,
        "disks": found.on_disk > DISK // GPUS,
    }
    return " and ".join(name for name, more in full.items() if more)


def fewest_nodes(num_params: int, way: Way) -> int:
    """How many nodes hold a model."""

    def fits(nodes: int) -> bool:
        found = estimated(num_params, nodes, way)
        there = (found.total, GPU), (found.on_host, HOST // GPUS), (found.on_disk, DISK // GPUS)
        return all(takes <= room for takes, room in there)

    return least(fits)


def least(fits: Callable[[int], bool]) -> int:
    """The least number from 1 on that fits, as do all above it."""
    high = 1
    while not fits(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def models_table() -> list[list[str]]:
    rows = [["parameters", "layers x hidden", "the paper's model states, TiB", "20 bytes each, TiB",
             "a layer, gathered", "nodes: on devices", "on hosts", "in files"]]  # fmt: skip
    for m in MODELS:
        nodes = (fewest_nodes(m.num_params, w) for w in (ON_DEVICES, ON_HOSTS, IN_FILES))
        rows.append(
            [
                readable_count(m.num_params),
                f"{m.layers} x {m.hidden}",
                f"{m.paper_tib:,.2f}",
                f"{20 * m.num_params / 2**40:,.2f}",
                readable_size(m.layer_bytes),
                *(f"{n:,}" for n in nodes),
            ]
        )
    return rows


def nodes_table() -> list[list[str]]:
    ways = (ON_DEVICES, ON_HOSTS, WAYS[5], WAYS[6], IN_FILES)
    rows = [["nodes", "GPUs", *(w.name for w in ways)]]
    for nodes in NODES:
        found = (readable_count(rounded(largest(nodes, w))) for w in ways)
        rows.append([str(nodes), str(GPUS * nodes), *found])
    return rows


def one_node_table() -> list[list[str]]:
    rows = [["on one node", "largest model", "what is full", "the paper trains"]]
    for way in WAYS:
        rows.append([way.name, readable_count(rounded(largest(1, way))), bound(1, way), way.paper])
    return rows


def steps_table() -> list[list[str]]:
    """Steps of models whose parameters, gradients and optimizer state are in files."""
    rows = [["parameters", "nodes", "on a device", "in a node's memory", "on its disks", "forward reads",
             "backward reads", "update reads and writes", "a step at least", "compute",
             "written a day, for each device"]]  # fmt: skip
    for num_params, nodes in ((10**12, 1), (10**12, 2), (32 * 10**12, 32), (100 * 10**12, 100)):
        found = estimated(num_params, nodes, IN_FILES, workload=TOKENS, rates=RATES)
        disk = [readable_seconds(part.ways["disk"]) for part in found.time.parts]
        rows.append(
            [
                readable_count(num_params),
                str(nodes),
                readable_size(found.total),
                readable_size(GPUS * found.on_host),
                readable_size(GPUS * found.on_disk),
                *disk,
                readable_seconds(found.time.seconds),
                f"{found.time.efficiency:.0%}",
                readable_size(found.time.written_a_day),
            ]
        )
    return rows


def rounded(num_params: int) -> int:
    """To three digits."""
    return int(float(f"{num_params:.3g}"))


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> dict[str, list[list[str]]]:
    """By the name of each."""
    return {
        "one node": one_node_table(),
        "nodes": nodes_table(),
        "models": models_table(),
        "steps": steps_table(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    found = tables()
    for name, rows in found.items():
        print(f"{name}\n\n{markdown(rows)}\n")
    result = {**records.versions("jax"), "jzero files": records.library(), "tables": found}
    path = args.out / f"{result['date']}-largest.json"
    records.write(path, result)
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
