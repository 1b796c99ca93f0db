"""Both engines of jzero on models of `experiments/rivals`, compiled ahead of time for 8 H200s.

python experiments/passes/engines.py                  # no GPU is needed
python experiments/passes/engines.py --rows DiT --engines partitioned

Nothing runs. Prints a table; compiled programs are kept in .cache/rivals.
"""

import argparse
import os
from typing import Any

import jax

import jzero
from experiments.passes.measure import WHERE, found
from experiments.rivals import zoo
from experiments.shared import records
from jzero.segments import _partitioned

ROWS = ("Flax GPT", "our GPT", "Llama", "DiT")
ENGINES = {"interpreted": "0", "partitioned": "1"}


def step(name: str) -> tuple[zoo.Rival, int]:
    """The step of a row by the engine that the environment says, and how many parameters it trains."""
    row = zoo.ROWS[name]
    made = zoo.rival("jzero", row, row.small or row.model, jzero.target_mesh(**WHERE))
    return made, sum(x.size for x in jax.tree.leaves(made.state["params"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    args = parser.parse_args()
    print(records.versions("jax", "jaxlib", "flax"))
    print("| model | engine | peak, GiB | moved, bytes per parameter | exposed, ms | step, ms | gathers |"
          " reductions |\n" + "| --- " * 8 + "|")  # fmt: skip
    for name in args.rows:
        for engine in args.engines:
            os.environ[_partitioned.SWITCH] = ENGINES[engine]
            made, parameters = step(name)
            check(made, engine)
            cells: Any = found(made.lower(), parameters)
            numbers = [f"{x:.2f}" for x in cells[:4]]
            print("|", " | ".join([name, engine, *numbers, *cells[4:]]), "|", flush=True)


def check(made: zoo.Rival, engine: str) -> None:
    """Refuses a step that the partitioner does not run."""
    if engine == "partitioned":
        made.step.program(made.state, made.batch, after=_partitioned.PASSES[-1])


if __name__ == "__main__":
    main()
