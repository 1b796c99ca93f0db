"""What it saves that each matrix is updated by one device: operations, traffic and time of a step with Muon.

python experiments/owner/measure.py            # 2, 4 and 8 virtual CPU devices; some minutes

Every case is compiled and run twice in one process: by owners, and with every matrix gathered and updated by
every device, as jzero did before it had owners. Prints a table in Markdown, writes <date>.json.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from experiments.shared import records
from experiments.shared.devices import use_virtual_devices

use_virtual_devices(8)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import jzero  # noqa: E402
from jzero.sharding.plan import _make  # noqa: E402

# ---------------------------------------------------------------------------------------------
matrices = (4, 8, 12)
devices = (2, 4, 8)
forms = ("separate", "stacked")
warm_up, repeats = 1, 7
# ---------------------------------------------------------------------------------------------
HEADER = (
    "matrices", "devices", "flops of one device's, by owners", "ceil(M/N)/M", "by all", "all-to-all MiB",
    "gathered MiB, by owners", "by all", "time by owners to that by all, fastest step", "median",
)  # fmt: skip


def parameters(form: str, num: int, dim: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), num)
    leaves = [jax.random.normal(key, (dim, dim)) for key in keys]
    if form == "stacked":
        return {"w": jnp.stack(leaves)}
    return {f"w{i}": leaf for i, leaf in enumerate(leaves)}


def optimizer(form: str) -> optax.GradientTransformation:
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    if form == "separate":
        return optax.contrib.muon(1e-2, weight_decay=1e-2)
    return optax.contrib.muon(
        1e-2,
        weight_decay=1e-2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda w: numbers, params),
    )


def make_step(form: str) -> Callable[..., Any]:
    """A step that is all update: its gradients cost no product."""
    tx = optimizer(form)

    def step(state: Any, x: jax.Array) -> Any:
        params, opt_state = state

        def loss_fn(params: Any) -> jax.Array:
            fits = [jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(params)]
            return jnp.mean(x * x) * sum(fits)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step


def flops(lowered: Any) -> float:
    return float(lowered.compile().cost_analysis()["flops"])


class Case:
    """One step, by owners or by all devices."""

    def __init__(self, form: str, num: int, mesh: Any, dim: int, stage: int):
        params, self.x = parameters(form, num, dim), jnp.ones((8, 4))
        state = (params, optimizer(form).init(params))
        self.train_step: Any = jzero.shard_train_step(make_step(form), stage=stage, mesh=mesh)
        self.report = self.train_step.describe(state, self.x)
        self.flops = flops(self.train_step.lower(state, self.x))
        self.state = self.train_step.shard(state, self.x)
        self.seconds: list[float] = []

    def run(self) -> None:
        start = time.perf_counter()
        self.state, loss = self.train_step(self.state, self.x)
        jax.block_until_ready((self.state, loss))
        self.seconds.append(time.perf_counter() - start)

    def mib(self, op: str) -> float:
        return sum(c.nbytes for c in self.report.traffic if c.op == op) / 2**20


def measure(form: str, num: int, num_devices: int, dim: int, stage: int) -> dict[str, Any]:
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    owners = Case(form, num, mesh, dim, stage)
    # The plan of a step that nobody owns: the rest of the program is the same.
    with mock.patch.object(_make, "_distributes_updates", return_value=False):
        everyone = Case(form, num, mesh, dim, stage)
    for _ in range(warm_up + repeats):
        owners.run()
        everyone.run()
    for a, b in zip(jax.tree.leaves(owners.state), jax.tree.leaves(everyone.state), strict=True):
        # Newton-Schulz amplifies what sums in another order change.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-3)
    step, params = make_step(form), parameters(form, num, dim)
    one = flops(jax.jit(step).lower((params, optimizer(form).init(params)), owners.x))
    return {
        "form": form, "matrices": num, "devices": num_devices, "dim": dim, "stage": stage,
        "flops": owners.flops / one, "bound": -(-num // num_devices) / num,
        "flops_by_all": everyone.flops / one,
        "all_to_all_mib": owners.mib("all-to-all"), "gathered_mib": owners.mib("all-gather"),
        "gathered_mib_by_all": everyone.mib("all-gather"),
        "seconds": owners.seconds[warm_up:], "seconds_by_all": everyone.seconds[warm_up:],
    }  # fmt: skip


def row(found: dict[str, Any]) -> str:
    fastest, median = (
        reduced(found["seconds"]) / reduced(found["seconds_by_all"])
        for reduced in (min, statistics.median)
    )
    cells = [
        f"{found['matrices']} {found['form']}", found["devices"], f"{found['flops']:.3f}",
        f"{found['bound']:.3f}", f"{found['flops_by_all']:.3f}", f"{found['all_to_all_mib']:.2f}",
        f"{found['gathered_mib']:.2f}", f"{found['gathered_mib_by_all']:.2f}",
        f"{fastest:.2f}", f"{median:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dim", type=int, default=256, help="rows and columns of a matrix")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    result: dict[str, Any] = {**records.environment("jax", "optax"), "library": records.library()}
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    result["cases"] = []
    for form in forms:
        for num in matrices:
            for num_devices in devices:
                found = measure(form, num, num_devices, args.dim, args.stage)
                result["cases"].append(found)
                print(row(found), flush=True)
    records.write(args.out / f"{result['date']}.json", result)


if __name__ == "__main__":
    main()
