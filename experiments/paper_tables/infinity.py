"""What ZeRO-Infinity says of bandwidths (section 4, figure 3), from its formula, and what jzero makes of it.

python experiments/paper_tables/infinity.py                 # prints the tables, writes results/
python experiments/paper_tables/infinity.py --out /tmp/x    # elsewhere

Writes <date>-infinity.json (every number, versions) and <date>-infinity.png (the curves).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import formulas
import jzero
import paper
from experiments.shared import pictures, records
from jzero._quantities import readable_rate
from jzero.reports._step_time import StepTime
from tables import markdown

RESULTS = Path(__file__).with_name("results")
BATCHES, WIDTHS = (1, 2, 4, 8, 16), (2048, 8192, 16384, 32768, 65536)
BANDWIDTHS = tuple(10**9 * 2**n for n in range(-4, 12))
H200_PEAK, PCIE = "989TFLOP/s", "55GB/s"


class Found(NamedTuple):
    """A statement of the paper, and what its formula gives."""

    statement: paper.Statement
    efficiency: float
    bandwidth: float


def intensity(kind: str, size: int) -> float:
    """Operations per byte; `size` is a batch per GPU, or the hidden size."""
    if kind == "activations":
        return formulas.intensity_of_activations(size)
    of = {"parameters and gradients": formulas.intensity_of_parameters,
          "optimizer state": formulas.intensity_of_optimizer_state}  # fmt: skip
    return of[kind](size, paper.INFINITY_SEQUENCE)


def statements() -> list[Found]:
    """The efficiency at the paper's bandwidth, and the bandwidth for the paper's efficiency."""
    peak = paper.INFINITY_PEAK
    return [
        Found(s, formulas.efficiency(intensity(s.kind, s.size), s.bandwidth, peak),
              formulas.bandwidth_for(s.efficiency, intensity(s.kind, s.size), peak))
        for s in paper.INFINITY_STATEMENTS
    ]  # fmt: skip


def hides_from(devices: int) -> StepTime:
    """A step of jzero with parameters in pinned memory, on GPUs of today."""
    memory = jzero.Memory(params=jzero.PinnedHost(2**34), optimizer=jzero.HostCPU())
    found = jzero.estimate(
        "1T", devices=devices, memory=memory, workload=jzero.Workload(tokens="8K"),
        rates=jzero.Rates(peak=H200_PEAK, pcie=PCIE),
    ).time  # fmt: skip
    assert found is not None
    return found


def statements_table(found: Sequence[Found]) -> str:
    def row(x: Found) -> list[str]:
        s = x.statement
        size = f"hidden size {s.size:,}" if s.kind == "activations" else f"batch of {s.size}"
        return [s.kind, size, readable_rate(s.bandwidth), f"{s.efficiency:.0%}", f"{x.efficiency:.1%}",
                readable_rate(x.bandwidth)]  # fmt: skip

    header = ["what moves", "with", "the paper's bandwidth", "suffices for", "by formula it gives",
              "by formula that needs"]  # fmt: skip
    return markdown(header, map(row, found))


def tokens_table() -> str:
    def row(devices: int) -> list[str]:
        found = hides_from(devices).hides_from
        return [str(devices), *(f"{found[name]:,}" for name in ("forward pass", "backward pass"))]

    return markdown(["devices", "forward pass", "backward pass"], map(row, (1, 8, 64, 512)))


def sections() -> dict[str, str]:
    """Every table of the README's section, by its heading."""
    return {
        "Bandwidths of ZeRO-Infinity": statements_table(statements()),
        "From how many tokens pinned parameters hide": tokens_table(),
    }


def curves() -> dict[str, dict[int, list[float]]]:
    """Figure 3: the efficiency at each of `BANDWIDTHS`, by what moves, then by batch or hidden size."""
    sizes = {"parameters and gradients": BATCHES, "optimizer state": BATCHES, "activations": WIDTHS}
    return {
        kind: {n: [formulas.efficiency(intensity(kind, n), bw, paper.INFINITY_PEAK) for bw in BANDWIDTHS]
               for n in of}
        for kind, of in sizes.items()
    }  # fmt: skip


def plot(path: Path) -> None:
    """A panel for what moves, a line for each batch or hidden size, and the paper's statements as dots."""
    with pictures.drawn(path, 1, 3, font=11, figsize=(12, 3.8), sharey=True) as (_, panels):
        for axes, (kind, lines) in zip(panels, curves().items(), strict=True):
            of = "hidden size" if kind == "activations" else "batch"
            gigabytes = [bw / 1e9 for bw in BANDWIDTHS]
            for i, (size, line) in enumerate(lines.items()):
                axes.plot(gigabytes, line, color=pictures.pyplot.cm.Blues(0.35 + 0.15 * i),
                          label=f"{of} {size:,}")  # fmt: skip
            said = [x for x in statements() if x.statement.kind == kind]
            axes.plot([x.statement.bandwidth / 1e9 for x in said], [x.statement.efficiency for x in said],
                      "o", color="#c62828", label="the paper's text")  # fmt: skip
            axes.set(xscale="log", title=kind, xlabel="GB/s for each GPU")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, loc="lower right")
        panels[0].set_ylabel("efficiency, nothing hidden")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    for heading, table in sections().items():
        print(f"{heading}\n\n{table}\n")
    result: dict[str, Any] = {
        **records.versions("jax"),
        "statements": [{**x.statement._asdict(), "found_efficiency": x.efficiency,
                        "found_bandwidth": x.bandwidth} for x in statements()],
        "bandwidths": BANDWIDTHS,
        "efficiency": curves(),
        "hides_from_tokens": {n: dict(hides_from(n).hides_from) for n in (1, 8, 64, 512)},
    }  # fmt: skip
    stem = f"{args.out / result['date']}"
    records.write(Path(f"{stem}-infinity.json"), result)
    plot(Path(f"{stem}-infinity.png"))


if __name__ == "__main__":
    main()
