"""What owners of matrices save on GPUs: memory and traffic of an update with Muon, compiled for H200s.

python experiments/owner/on_gpus.py            # 8 H200s; no GPU needed (JAX_PLATFORMS=cpu), a minute

Nothing runs. Prints a table in Markdown, writes <date>-h200.json.
"""

import argparse
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import jzero
from experiments.shared import records
from jzero.sharding.plan import _make
from measure import forms, make_step, optimizer, parameters

HEADER = (
    "matrices", "updated by", "at rest GiB", "temporary GiB", "peak GiB", "gathered MiB", "all-to-all MiB",
)  # fmt: skip


def measure(form: str, num: int, dim: int, stage: int, by_owners: bool) -> dict[str, Any]:
    def init() -> Any:
        params = parameters(form, num, dim)
        return params, optimizer(form).init(params)

    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    with mock.patch.object(_make, "_distributes_updates", return_value=by_owners):
        train_step: Any = jzero.shard_train_step(make_step(form), stage=stage)
        state = jax.eval_shape(init)
        found = jzero.preflight(train_step, state, batch, target="h200", topology="1x8")
    return {
        "form": form, "matrices": num, "dim": dim, "stage": stage, "by_owners": by_owners,
        "at_rest_bytes": found.at_rest, "temporary_bytes": found.temporary_bytes,
        "peak_bytes": found.peak_bytes, "gathered_bytes": found.nbytes("all-gather"),
        "all_to_all_bytes": found.nbytes("all-to-all"),
    }  # fmt: skip


def row(found: dict[str, Any]) -> str:
    gib = (f"{found[f'{what}_bytes'] / 2**30:.2f}" for what in ("at_rest", "temporary", "peak"))
    mib = (f"{found[f'{what}_bytes'] / 2**20:.0f}" for what in ("gathered", "all_to_all"))
    who = "owners" if found["by_owners"] else "all"
    return f"| {found['matrices']} {found['form']} | {who} | {' | '.join([*gib, *mib])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--matrices", type=int, default=12)
    parser.add_argument("--dim", type=int, default=4096, help="rows and columns of a matrix")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {
        **records.versions("jax", "jaxlib", "optax"),
        "target": "8 x H200, compiled ahead of time",
        "library": records.library(),
    }
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    result["cases"] = []
    for form in forms:
        for by_owners in (True, False):
            found = measure(form, args.matrices, args.dim, args.stage, by_owners)
            result["cases"].append(found)
            print(row(found), flush=True)
    records.write(args.out / f"{result['date']}-h200.json", result)


if __name__ == "__main__":
    main()
