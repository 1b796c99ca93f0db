"""What codes on the wire do to a training: 1000 steps of some seeds in each format, beside exact ones.

python experiments/wire/quality.py               # half an hour on two cores; goes on where it stopped
python experiments/wire/quality.py --first 3 --ways exact both          # three more seeds of some
python experiments/wire/quality.py --show        # the table of the last result

A byte-level GPT learns Python's standard library at stage 3 over axes "node" and "local" of two devices each.
All trainings of a seed start alike and see the same batches. Afterwards each is asked for the same held-out
sequences, with the parameters as they rest. Three seeds of a format are one step, mapped over them; no block
of codes holds numbers of two. Prints a table in Markdown, writes <date>-quality.json and .png; what has been
trained is in out/.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
import paired
from experiments.shared import pictures, records, training
from experiments.shared.devices import use_virtual_devices
from experiments.shared.gpt import GPT, State, make_step

HERE = Path(__file__).parent
AXES = {"node": 2, "local": 2}
ROWS = 4  # sequences of a step, over all devices
# At 6e-3, with two layers, exact trainings of a seed ended up to 0.05 nats apart, and nothing could be told.
LEARNING_RATE = 2e-3
HELD_OUT = 1024  # sequences
LAST = 200  # steps whose training loss counts
AT_ONCE = 3  # seeds of a program
KEPT = ("held out", "losses")  # of a training, by seed
COMPARED = ("held out", "training")  # of a result
AGAINST = {  # ways, and others that they are compared with, too
    "reductions in int4/128 rotated": "reductions in int4/128",
    "gathers in int4/128 rotated": "gathers in int4/128",
    "gathers in int4/128 stochastic": "gathers in int4/128",
    "gathers in int4/2048": "gathers in int4/128",
}
BIN = 20  # steps of a point of a curve
SMOOTH = 5  # points of a curve that are drawn as one


def int4(size: int, **more: bool) -> jzero.Blocks:
    return jzero.Blocks(jnp.int4, size, **more)


ROTATED = int4(128, rotate=True)
HOPS = {"local": jnp.int8, "node": ROTATED}
FLOAT8 = "gathers in float8"
EXACT = {
    "exact": jzero.Comm(),
    "exact, reductions in bfloat16": jzero.Comm(reduce_dtype=jnp.bfloat16),
    "exact, reductions in float16": jzero.Comm(reduce_dtype=jnp.float16),
}
CODED = {
    "gathers in int8": jzero.Comm(gather_dtype=jnp.int8),
    "reductions in int8": jzero.Comm(reduce_dtype=jnp.int8),
    "reductions in int8, int4/128 rotated": jzero.Comm(reduce_dtype=HOPS),
    "both": jzero.Comm(gather_dtype=jnp.int8, reduce_dtype=HOPS),
    FLOAT8: jzero.Comm(),
    "gathers in int4/32": jzero.Comm(gather_dtype=int4(32)),
    "gathers in int4/32 rotated": jzero.Comm(gather_dtype=int4(32, rotate=True)),
    "gathers in int4/32 stochastic": jzero.Comm(gather_dtype=int4(32, stochastic=True)),
    "gathers in int4/128": jzero.Comm(gather_dtype=int4(128)),
    "gathers in int4/128 rotated": jzero.Comm(gather_dtype=ROTATED),
    "gathers in int4/128 stochastic": jzero.Comm(gather_dtype=int4(128, stochastic=True)),
    "gathers in int4/2048": jzero.Comm(gather_dtype=int4(2048)),
    "reductions in int4/128": jzero.Comm(reduce_dtype=int4(128)),
    "reductions in int4/128 rotated": jzero.Comm(reduce_dtype=ROTATED),
    "reductions in int4/2048": jzero.Comm(reduce_dtype=int4(2048)),
}
WAYS = EXACT | CODED


@jax.custom_vjp
def through_float8(w: jax.Array) -> jax.Array:
    """What float8 leaves of weights; their gradient is that of what was left."""
    return w.astype(jnp.float8_e4m3fn).astype(w.dtype)


through_float8.defvjp(lambda w: (through_float8(w), None), lambda _, grad: (grad,))


class Float8GPT(GPT):
    """A GPT that casts its matrices to float8 itself, so that these bytes are gathered."""

    def block(
        self, x: jax.Array, weights: Any, constrain: Any = None, gathered: Any = None
    ) -> jax.Array:
        cast = {name: through_float8(w) for name, w in weights.items() if name != "scales"}
        return super().block(x, weights | cast)

    def loss(
        self, params: Any, tokens: jax.Array, constrain: Any = None, gathered: Any = None
    ) -> jax.Array:
        return super().loss(params | {"embed": through_float8(params["embed"])}, tokens)


def model_of(kind: type[GPT] = GPT) -> GPT:
    size: dict[str, Any] = dict(layers=1, dim=128, heads=4, vocab=256, context=64)
    return kind(**size, scan=False, remat=False, dtype=jnp.float32)


def init(model: GPT, tx: optax.GradientTransformation, seed: int) -> State:
    rng = np.random.default_rng(seed)

    def make(shape: tuple[int, ...]) -> jax.Array:
        if shape[0] == 2:  # scales of norms, beside 1
            return jnp.zeros(shape)
        return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    return model.state(tx, make)


class Trainings:
    """Trainings of one model on one text, all seeds side by side: dim 0 of the state, dim 1 of a batch."""

    def __init__(self, steps: int, seeds: Sequence[int]):
        common, _ = training.modules()
        self.steps, self.seeds, self.data, self.text = steps, seeds, common.data, common.data.load()
        self.tx = common.adamw(steps, LEARNING_RATE)
        self.held_out = next(self.windows(self.text.held_out, HELD_OUT, 0))
        self.evaluate = jax.jit(jax.vmap(sequence_losses, in_axes=(0, None)))

    def windows(self, text: np.ndarray, rows: int, seed: int) -> Iterator[np.ndarray]:
        found = self.data.Windows(text, rows, model_of().context + 1, seed)
        while True:
            yield next(found).astype(np.int32)

    def init(self) -> State:
        states = [init(model_of(), self.tx, seed) for seed in self.seeds]
        stacked: State = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        return stacked

    def batches(self) -> Iterator[jax.Array]:
        """`int32[rows, seeds, context + 1]`."""
        found = [self.windows(self.text.train, ROWS, seed) for seed in self.seeds]
        while True:
            yield jnp.stack([next(windows) for windows in found], axis=1)

    def train(self, name: str) -> dict[str, Any]:
        """Losses of each seed in one of `WAYS`, and the bytes of a step."""
        model = model_of(Float8GPT if name == FLOAT8 else GPT)
        mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES))
        step = jax.vmap(make_step(model.loss, self.tx), in_axes=(0, 1))
        comm = dataclasses.replace(WAYS[name], gather="keep")
        train_step = jzero.shard_train_step(step, comm=comm, mesh=mesh)
        state, losses, start = train_step.init(self.init), [], 0.0
        traffic = train_step.describe(state, next(self.batches())).traffic
        for i, batch in zip(range(self.steps), self.batches(), strict=False):
            state, loss = train_step(state, batch)
            losses.append(loss)
            if i % BIN == 0:
                loss.block_until_ready()  # or calls pile up
                start = start or time.perf_counter()
        seconds = time.perf_counter() - start
        params = jax.device_get(train_step.unshard(state)["params"])
        held_out = self.evaluate(params, self.held_out)
        return {
            "bytes": sum(c.nbytes for c in traffic),
            "losses": np.array(losses, float).T.round(6).tolist(),
            "held out": np.array(held_out, float).round(6).tolist(),
            "milliseconds a step": round(1e3 * seconds / self.steps, 1),
        }


def sequence_losses(params: Any, rows: jax.Array) -> jax.Array:
    """Of sequences `int32[rows, context + 1]` each one's; with parameters as they rest."""
    return jax.lax.map(lambda row: model_of().loss(params, row[None]), rows, batch_size=64)


def train(args: argparse.Namespace) -> None:
    """What is not in out/ yet."""
    library, seeds = records.library(), range(args.first, args.first + AT_ONCE)
    trainings = Trainings(args.steps, seeds)
    for name in args.ways:
        path = args.out / f"{name.replace('/', '-')}, from {args.first}.json"
        if not path.exists():
            found = trainings.train(name) | {"name": name, "jzero files": library}
            records.write(path, found)
            losses = " ".join(f"{x:.4f}" for x in np.mean(found["held out"], axis=1))
            print(f"{name}: {losses}, {found['milliseconds a step']} ms a step", flush=True)


def gather(folder: Path) -> dict[str, Any]:
    """The result of all trainings: numbers of each way and seed."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*, from *.json"))]
    ways: dict[str, Any] = {}
    for name in WAYS:
        found = [run for run in runs if run["name"] == name]
        if found:
            held_out, losses = (np.concatenate([x[what] for x in found]) for what in KEPT)
            ways[name] = {
                "bytes": found[0]["bytes"],
                "held out": held_out.mean(1).round(6).tolist(),
                "training": losses[:, -LAST:].mean(1).round(6).tolist(),
                "curves": losses.reshape(len(losses), -1, BIN).mean(2).round(4).tolist(),
                "milliseconds a step": [x["milliseconds a step"] for x in found],
            }
    return {
        **records.environment("jax", "jaxlib", "optax"),
        "jzero files": sorted({run["jzero files"] for run in runs}),
        "parameters": model_of().num_params,
        "steps": len(runs[0]["losses"][0]),
        "ways": ways,
    }


def pairs_of(result: dict[str, Any], name: str, what: str, other: str = "exact") -> np.ndarray:
    """Of each seed that both ways have, the number of one less that of the other."""
    one, two = (np.array(result["ways"][x][what]) for x in (name, other))
    num = min(len(one), len(two))
    return one[:num] - two[:num]


def show(result: dict[str, Any]) -> None:
    exact = result["ways"]["exact"]
    print(f"{result['parameters']:,} parameters, {result['steps']} steps, JAX {result['jax']}")
    print(f"held-out loss of exact ones: {', '.join(f'{x:.4f}' for x in exact['held out'])}\n")
    print("| | bytes moved | seeds | held-out loss | training loss | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, way in list(result["ways"].items())[1:]:
        cells = [f"{way['bytes'] / exact['bytes']:.2f}", str(len(way["training"]))]
        print(f"| {name} | {' | '.join([*cells, *compared(result, name)])} |")
    print()
    for name, other in AGAINST.items():
        if {name, other} <= set(result["ways"]):
            print(f"* {name} - {other}: {', '.join(compared(result, name, other))}")


def compared(result: dict[str, Any], name: str, other: str = "exact") -> list[str]:
    """Held-out loss, training loss, and what the first of them says."""
    found = [paired.difference(pairs_of(result, name, what, other)) for what in COMPARED]
    return [*map(said, found), found[0].verdict]


def said(x: paired.Difference) -> str:
    """In thousandths of a nat."""
    digits = 2 if abs(x.mean) < 1e-3 else 1
    return f"{1e3 * x.mean:+.{digits}f} ± {1e3 * x.half:.{digits}f}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Training losses beside those of exact runs, and the intervals of the held-out ones."""
    names = list(result["ways"])[1:]
    apart = 1e3 * smooth(np.array([pairs_of(result, name, "curves").mean(0) for name in names]))
    held_out = [paired.difference(pairs_of(result, name, "held out")) for name in names]
    with pictures.drawn(path, 1, 2, figsize=(13, 6.5), width_ratios=[1, 1.1]) as (_, (left, right)):
        steps = BIN * (np.arange(apart.shape[1]) + SMOOTH / 2)
        for row, (name, curve, x) in enumerate(zip(names, apart, held_out, strict=True)):
            left.plot(steps, curve, color=color_of(name), linewidth=1.2, alpha=0.8)
            how: dict[str, Any] = dict(color=color_of(name), capsize=3, fmt="o", markersize=5)
            right.errorbar(1e3 * x.mean, len(names) - row, xerr=1e3 * x.half, **how)
        title = f"mean of seeds, over {SMOOTH * BIN} steps"
        left.set(xlabel="step", ylabel="training loss - exact's, thousandths of a nat", title=title)
        right.set_yticks(range(len(names), 0, -1), names, fontsize=10)
        right.set(xlabel="thousandths of a nat", title="held-out loss - exact's, 95 %")
        left.set_yscale("symlog", linthresh=1)
        right.set_xscale("symlog", linthresh=1)
        for axes, line in ((left, left.axhline), (right, right.axvline)):
            line(0, color="black", linewidth=0.8)
            axes.grid(alpha=0.3)


def smooth(curves: np.ndarray) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(curves, SMOOTH, axis=-1)
    means: np.ndarray = windows.mean(-1)
    return means


def color_of(name: str) -> str:
    if name.startswith("exact"):
        return "#455a64"
    if "2048" in name:
        return "#c62828"
    of_8_bits = name == "both" or "8" in name.replace("128", "")
    return "#1565c0" if of_8_bits else "#ef6c00"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--show", action="store_true", help="what the last run has written")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help=f"of the {AT_ONCE} seeds to train")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--out", type=Path, default=HERE / "out" / "quality")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if not args.show:
        use_virtual_devices(4)
        train(args)
        result = gather(args.out)
        path = args.results / f"{result['date']}-quality.json"
        records.write(path, result)
        draw(result, path.with_suffix(".png"))
        print(f"written: {os.path.relpath(path)}")
    show(records.latest(args.results, "quality"))


if __name__ == "__main__":
    main()
