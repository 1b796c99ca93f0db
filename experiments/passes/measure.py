"""Passes on explicit programs, compiled ahead of time for 8 H200s; beside them what jzero runs.

python experiments/passes/measure.py                  # no GPU is needed
python experiments/passes/measure.py --rows Llama --programs partitioned --passes none all

Nothing runs. Prints a table; compiled programs are kept in .cache/rivals.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import jzero
from experiments.passes import steps
from experiments.rivals import measure, report, zoo
from experiments.rivals.models.gpt import GPT
from experiments.rivals.models.llama import Llama
from experiments.shared import records
from jzero.sharding.passes._after_loops import after_loops
from jzero.sharding.passes._inputs_first import inputs_first
from jzero.sharding.passes._order import order
from jzero.sharding.passes._prefetch import prefetch
from jzero.sharding.passes._whole_stacks import whole_stacks

WHERE: dict[str, Any] = {"target": "h200", "topology": "1x8"}
DEVICES, AHEAD, TOGETHER = 8, 2**28, 2**24  # bytes: those of `shard_train_step` on 8 devices
Pass = Callable[[Any], Any]


def _first(jaxpr: Any) -> Any:
    return inputs_first(jaxpr, AHEAD)


def _first_at_128_mib(jaxpr: Any) -> Any:
    return inputs_first(jaxpr, AHEAD // 2)


def _ahead(jaxpr: Any) -> Any:
    return prefetch(jaxpr, AHEAD)


def _ordered(jaxpr: Any) -> Any:
    return order(jaxpr, TOGETHER)


def _one_by_one(jaxpr: Any) -> Any:
    return order(jaxpr, 0)


PASSES: dict[str, tuple[Pass, ...]] = {
    "none": (),
    "prefetch": (_ahead,),
    "prefetch, after_loops": (_ahead, after_loops),
    "order": (_ordered,),
    "inputs_first, 128 MiB": (_first_at_128_mib,),
    "all but order": (_first, _ahead, after_loops),
    "all": (_first, _ahead, _ordered, after_loops),
    "all but order, whole_stacks": (_first, whole_stacks, _ahead, after_loops),
    "all, whole_stacks": (_first, whole_stacks, _ahead, _ordered, after_loops),
    "all, one by one": (_first, _ahead, _one_by_one, after_loops),
}
ROWS: dict[str, Any] = {
    "our GPT": GPT(layers=24, dim=1280, heads=20),
    "Llama": Llama(layers=16, dim=1024, heads=16, kv_heads=4, hidden=3584),
}


class Found(NamedTuple):
    peak: float
    moved: float
    exposed: float
    step: float
    gathers: str
    reductions: str


def found(lowered: jax.stages.Lowered, parameters: int, where: dict[str, Any] = WHERE) -> Found:
    program = measure.Kept(lowered, {})
    row = measure.numbers(jzero.preflight(program, **where, compiler_options={}))
    row["parameters"] = parameters
    return Found(
        report.peak(row), report.moved(row), report.exposed(row), report.step(row),
        report.gathers(row), report.reductions(row),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    programs = ["jzero", *steps.PROGRAMS]
    parser.add_argument("--programs", nargs="+", choices=programs, default=programs)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    args = parser.parse_args()
    print(records.versions("jax", "jaxlib"))
    print("| model | program | passes | peak, GiB | moved, bytes per parameter | exposed, ms | step, ms |"
          " gathers | reductions |\n" + "| --- " * 9 + "|")  # fmt: skip
    mesh = jzero.target_mesh(**WHERE)
    for name in args.rows:
        model = ROWS[name]
        given = zoo.rival("jzero", zoo.Row(model), model, mesh)
        parameters = sum(x.size for x in jax.tree.leaves(given.state["params"]))
        if "jzero" in args.programs:
            write(name, "jzero", "", found(given.lower(), parameters))
        for program in (each for each in args.programs if each != "jzero"):
            explicit = steps.PROGRAMS[program](model, mesh, given)
            for passes in args.passes:
                lowered = explicit.lower(explicit.program.through(*PASSES[passes]))
                write(name, program, passes, found(lowered, parameters))


def write(name: str, program: str, passes: str, cells: Found) -> None:
    numbers = [f"{x:.2f}" for x in cells[:4]]
    print("|", " | ".join([name, program, passes, *numbers, *cells[4:]]), "|", flush=True)


if __name__ == "__main__":
    main()
