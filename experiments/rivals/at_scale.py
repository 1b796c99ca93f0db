"""The same rivals, one or more sequences on each device, and what holds their memory at the peak.

python experiments/rivals/at_scale.py --devices 64 --styles "scanned + remat" --sequences 4

Nothing runs. Writes a line of at_scale/<date>.jsonl for every program, and leaves out those that are there. A
line says what `measure.py`'s say, and `held`: bytes by kind, from XLA's own dump of its buffer assignment.
"""

import argparse
import dataclasses
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
import measure
import what_holds
from experiments.shared import records
from experiments.shared.gpt import make_step

KEEP = "jzero, gather='keep'"
RIVALS = ("jzero", "annotated jit", KEEP)


def compiled(
    rival: str, devices: int, style: measure.Style, sequences: int, dump: str
) -> jzero.Preflight:
    """As `measure.programs`, with so many sequences on each device."""
    model = dataclasses.replace(measure.sizes[devices], **style._asdict())
    mesh = jzero.target_mesh("h200", measure.topology(devices))
    on_rows = NamedSharding(mesh, P("data"))
    state = jax.eval_shape(lambda: model.state(measure.tx))
    tokens = jax.ShapeDtypeStruct((sequences * devices, model.context + 1), jnp.int32)
    step = make_step(model.loss, measure.tx)
    gather = "keep" if rival == KEEP else None
    train_step = jzero.shard_train_step(step, stage=3, mesh=mesh, gather=gather)
    where: dict[str, Any] = {"target": "h200", "topology": measure.topology(devices)}
    where["compiler_options"] = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
    if rival in ("jzero", KEEP):
        return jzero.preflight(train_step, state, tokens, **where)
    at_rest = measure.sharded(state, train_step.state_shardings(state, tokens))
    constrain = partial(jax.lax.with_sharding_constraint, shardings=on_rows)
    step = make_step(partial(model.loss, constrain=constrain), measure.tx)
    lowered = measure.jitted(step, at_rest, measure.sharded(tokens, on_rows))
    return jzero.preflight(lowered, **where)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", choices=measure.sizes, default=[64, 512])
    parser.add_argument("--styles", nargs="+", default=["scanned + remat", "scanned"])
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=list(RIVALS[:2]))
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, default=what_holds.RESULTS)
    args = parser.parse_args()
    about = {**records.versions("jax", "jaxlib", "optax"), "target": "H200"}
    path = args.out / f"{about['date']}.jsonl"
    keys = ("devices", "style", "sequences", "rival")
    known = {tuple(x[key] for key in keys) for x in records.read_lines(path)}
    by_name = {str(style): style for style in measure.styles}
    wanted = [(n, style, s, rival) for s in args.sequences for n in args.devices
              for style in args.styles for rival in args.rivals]  # fmt: skip
    for cell in wanted:
        if cell in known:
            continue
        devices, style, sequences, rival = cell
        psi = measure.sizes[devices].num_params
        with tempfile.TemporaryDirectory() as dump:
            found = compiled(rival, devices, by_name[style], sequences, dump)
            held = what_holds.held_at_peak(Path(dump), measure.sizes[devices])
        result = {**dict(zip(keys, cell, strict=True)), "parameters": psi,
                  **measure.numbers(found, psi), "held": held, **about}  # fmt: skip
        records.append(path, result)
        print(*cell, result["peak_bytes_per_parameter"], result["hidden"], held, flush=True)


if __name__ == "__main__":
    main()
