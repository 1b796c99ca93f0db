"""Both engines of jzero on the models of `experiments/rivals`, compiled ahead of time for H200s.

python experiments/passes/engines.py                  # 64 devices; no GPU is needed
python experiments/passes/engines.py --devices 8      # the two GPTs and Llama, of half a billion parameters
python experiments/passes/engines.py --rows DiT UNet

Nothing runs. Prints a table, in a cell: interpreted / partitioned. Programs are kept in .cache/rivals.
"""

import argparse
import os
from typing import Any

import jax

import jzero
from experiments.passes.measure import Found, found
from experiments.rivals import zoo
from experiments.shared import records
from jzero.segments import _partitioned

ROWS = [name for name, row in zoo.ROWS.items() if row.accumulate == 1]
ENGINES = {"interpreted": "0", "partitioned": "1"}


def measured(name: str, engine: str, devices: int) -> Found:
    """The step of a row by an engine."""
    os.environ[_partitioned.SWITCH] = ENGINES[engine]
    row = zoo.ROWS[name]
    where: dict[str, Any] = {"target": "h200", "topology": f"{devices // 8}x8"}
    model = row.small if devices == 8 else row.model
    made = zoo.rival("jzero", row, model, jzero.target_mesh(**where))
    if engine == "partitioned":  # Raises an error if the partitioner does not run it.
        made.step.program(made.state, made.batch, after=_partitioned.PASSES[-1])
    return found(made.lower(), sum(x.size for x in jax.tree.leaves(made.state["params"])), where)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    args = parser.parse_args()
    print(records.versions("jax", "jaxlib", "flax"))
    head = [
        "model",
        "peak, GiB",
        "ratio",
        "moved, bytes per parameter",
        "exposed, ms",
        "ratio",
        "step, ms",
    ]
    head += ["gathers", "reductions"]
    print(f"| {' | '.join(head)} |\n" + "| --- " * len(head) + "|")
    for name in (name for name in args.rows if args.devices == 64 or zoo.ROWS[name].small):
        old, new = (measured(name, engine, args.devices) for engine in ENGINES)
        pairs: list[tuple[Any, Any]] = [*zip(old, new, strict=True)]
        cells = [" / ".join(_text(x) for x in pair) for pair in pairs]
        for at in (2, 0):
            a, b = pairs[at]
            cells.insert(at + 1, f"{b / a:.3f}")
        print("|", " | ".join([name, *cells]), "|", flush=True)


def _text(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:.2f}"


if __name__ == "__main__":
    main()
