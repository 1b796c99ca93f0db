"""jzero at stage 3 against `jax.jit` with the same shardings at rest, compiled for H200s ahead of time.

python experiments/rivals/measure.py                      # every cell, about half an hour; no GPU needed
python experiments/rivals/measure.py --devices 64 --styles "scanned + remat"

Nothing runs. Writes a line of <date>.jsonl for every program, and leaves out those that are there.
"""

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from experiments.shared import records
from experiments.shared.gpt import GPT, make_step


class Style(NamedTuple):
    """How the layers are written."""

    scan: bool
    remat: bool

    def __str__(self) -> str:
        return ("scanned" if self.scan else "unrolled") + (" + remat" if self.remat else "")


# ---------------------------------------------------------------------------------------------
sizes = {  # devices: the model trained on them, one sequence on each
    8: GPT(layers=24, dim=1280, heads=20),
    64: GPT(layers=36, dim=4096, heads=32),
    512: GPT(layers=36, dim=4096, heads=32),
}
styles = [Style(scan, remat) for scan in (True, False) for remat in (True, False)]
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def topology(num_devices: int) -> str:
    return f"{num_devices // 8}x8"


def sharded(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings
    )


def jitted(step: Callable[..., Any], state: Any, tokens: Any) -> jax.stages.Lowered:
    """What everybody writes: shardings at rest, in and out, and XLA's partitioner does the rest."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, tokens)


def programs(num_devices: int, style: Style) -> dict[str, Callable[[], jzero.Preflight]]:
    """The three rivals, compiled when called."""
    model = dataclasses.replace(sizes[num_devices], **style._asdict())
    mesh = jzero.target_mesh("h200", topology(num_devices))
    on_rows = NamedSharding(mesh, P("data"))
    state = jax.eval_shape(lambda: model.state(tx))
    tokens = jax.ShapeDtypeStruct((num_devices, model.context + 1), jnp.int32)
    train_step = jzero.shard_train_step(make_step(model.loss, tx), stage=3, mesh=mesh)
    where: dict[str, Any] = {"target": "h200", "topology": topology(num_devices)}

    def plain(constrain: Callable[[jax.Array], jax.Array]) -> jzero.Preflight:
        at_rest = sharded(state, train_step.state_shardings(state, tokens))
        step = make_step(partial(model.loss, constrain=constrain), tx)
        return jzero.preflight(jitted(step, at_rest, sharded(tokens, on_rows)), **where)

    return {
        "jzero": lambda: jzero.preflight(train_step, state, tokens, **where),
        "jit": lambda: plain(lambda x: x),
        "annotated jit": lambda: plain(lambda x: jax.lax.with_sharding_constraint(x, on_rows)),
    }


def numbers(found: jzero.Preflight, psi: int) -> dict[str, Any]:
    ops = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
    moved = {op: found.nbytes(op) for op in ops if found.nbytes(op)}
    return {
        "peak_bytes": found.peak_bytes,
        "temporary_bytes": found.temporary_bytes,
        "argument_bytes": found.argument_bytes,
        "peak_bytes_per_parameter": round(found.peak_bytes / psi, 4),
        "moved_bytes": moved,
        "moved_bytes_per_parameter": round(sum(moved.values()) / psi, 3),
        "hidden": found.hidden(),
        "collective_seconds": round(found.schedule.collective_seconds, 5),
        "exposed_seconds": round(found.schedule.exposed_seconds, 5),
        "product_seconds": round(found.schedule.product_seconds, 5),
        "compile_seconds": round(found.compile_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", choices=sizes, default=list(sizes))
    parser.add_argument("--styles", nargs="+", default=list(map(str, styles)))
    parser.add_argument("--rivals", nargs="+", default=["jzero", "jit", "annotated jit"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    about = {**records.versions("jax", "jaxlib", "optax"), "target": "H200"}
    path = args.out / f"{about['date']}.jsonl"
    known = {(x["devices"], x["style"], x["rival"]) for x in records.read_lines(path)}
    for num_devices in args.devices:
        psi = sizes[num_devices].num_params
        for style in styles:
            for rival, compile_it in programs(num_devices, style).items():
                wanted = str(style) in args.styles and rival in args.rivals
                if not wanted or (num_devices, str(style), rival) in known:
                    continue
                cell = {"devices": num_devices, "style": str(style), "rival": rival}
                result = {**cell, "parameters": psi, **numbers(compile_it(), psi), **about}
                records.append(path, result)
                print(*(f"{value}" for value in [*cell.values(), result["peak_bytes_per_parameter"],
                        result["moved_bytes"], result["hidden"], result["exposed_seconds"],
                        result["compile_seconds"]]), sep="  ", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
