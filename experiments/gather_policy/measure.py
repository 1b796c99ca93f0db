"""What each gather and reduce policy costs in traffic and in peak memory, compiled for H200s ahead of time.

python experiments/gather_policy/measure.py --devices 8              # no GPU needed, jax[cuda12] is
python experiments/gather_policy/measure.py --accumulate 1 --layers 8 --dim 4096 --policies prefetch
python experiments/gather_policy/measure.py --accumulate 1 --pipelined   # with XLA's collective pipelining

Nothing runs: XLA:GPU compiles the step for that many H200s and reports its memory and its schedule.
Writes <date>-<devices>-accumulate-<k>[-<layers>x<dim>][-pipelined].json.
"""

import argparse
import collections
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

import jzero

# ---------------------------------------------------------------------------------------------
vocab_size = 32_768
context = 1024
num_layers = 24
dim = 1024
num_heads = dim // 64
rows_per_microbatch = 1  # sequences on each device
pipelining = (
    "--xla_gpu_enable_pipelined_all_gather=true --xla_gpu_enable_pipelined_reduce_scatter=true"
)
policies: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3, per_pass": {"stage": 3},
    "stage 3, prefetch 16 MiB": {"stage": 3, "prefetch_bytes": 2**24},
    "stage 3, prefetch 512 MiB": {"stage": 3, "prefetch_bytes": 2**29},
    "stage 3, prefetch 0": {"stage": 3, "prefetch_bytes": 0},
    "stage 3, keep": {"stage": 3, "gather": "keep"},
    "stage 3, once_per_step": {"stage": 3, "gather": "once_per_step"},
    "stage 3, per_pass, reduce once": {"stage": 3, "reduce": "once"},
    "stage 3, once_per_step, reduce once": {
        "stage": 3, "gather": "once_per_step", "reduce": "once",
    },
}  # fmt: skip
# ---------------------------------------------------------------------------------------------

tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))


def init() -> dict[str, Any]:
    shapes = {
        "embed": (vocab_size, dim),
        "positions": (context, dim),
        "blocks": {  # stacked along dim 0, one slice per layer
            "scales": (num_layers, 2, dim),
            "qkv": (num_layers, dim, 3 * dim),
            "project": (num_layers, dim, dim),
            "up": (num_layers, dim, 4 * dim),
            "down": (num_layers, 4 * dim, dim),
        },
    }
    params = jax.tree.map(jnp.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return {"params": params, "opt_state": tx.init(params)}


def block(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    scales = 1 + weights["scales"]
    qkv = jax.nn.standardize(x) * scales[0] @ weights["qkv"]
    q, k, v = (a.reshape(*a.shape[:-1], num_heads, -1) for a in jnp.split(qkv, 3, axis=-1))
    attention = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.reshape(x.shape) @ weights["project"]
    hidden = jax.nn.gelu(jax.nn.standardize(x) * scales[1] @ weights["up"])
    return x + hidden @ weights["down"], None


def loss_fn(params: dict[str, Any], batch: jax.Array) -> jax.Array:
    tokens, targets = batch[:, :-1], batch[:, 1:]
    embed, positions = (params[name].astype(jnp.bfloat16) for name in ("embed", "positions"))
    x, _ = jax.lax.scan(
        jax.checkpoint(block, prevent_cse=False), embed[tokens] + positions, params["blocks"]
    )
    logits = (jax.nn.standardize(x) @ embed.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def step(state: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def h200s(num_devices: int) -> jax.sharding.Mesh:
    """A mesh of devices that are not there; eight to a host."""
    config = Path(__file__).with_name("h200.txtpb").read_text()
    config = "\n".join(line for line in config.splitlines() if not line.startswith("#"))
    hosts, per_host = max(1, num_devices // 8), min(8, num_devices)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=config, topology=f"{hosts}x1x{per_host}"
    )
    return topologies.make_mesh(topology, (num_devices,), ("data",))


def measure(mesh: jax.sharding.Mesh, accumulate: int, options: dict[str, Any]) -> dict[str, Any]:
    state = jax.eval_shape(init)
    rows = rows_per_microbatch * accumulate * mesh.size
    batch = jax.ShapeDtypeStruct((rows, context + 1), jnp.int32)
    psi = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    train_step = jzero.shard_train_step(step, mesh=mesh, accumulate=accumulate, **options)
    report = train_step.describe(state, batch)
    start = time.process_time()
    lowered = jzero.shard_train_step(step, mesh=mesh, accumulate=accumulate, **options).lower(
        state, batch
    )
    traced = time.process_time()
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    return {
        "schedule": schedule(str(compiled.as_text()), mesh.size),
        # Of all threads: wall time depends on what else the machine does.
        "trace_and_lower_cpu_s": round(traced - start, 2),
        "compile_cpu_s": round(time.process_time() - traced, 1),
        "psi": psi,
        "all_gather_psi": round(report.elements("all-gather") / psi, 3),
        "reduce_scatter_psi": round(report.elements("reduce-scatter") / psi, 3),
        "at_rest_bytes": report.plan.nbytes_at_rest(),
        "temporary_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
    }


def schedule(text: str, num_devices: int) -> dict[str, dict[str, int]]:
    """How many collectives, and how many of their bytes, hide behind matrix products in the schedule.

    A collective hides if a product stands between its start and its end. Each counts as often as the
    loops around it turn, with the bytes of the whole value; `in_loops` are those of the layer loops.
    """
    ops = ("all-gather", "reduce-scatter")
    counts: dict[str, collections.Counter[str]] = {op: collections.Counter() for op in ops}
    for lines, times, is_layer_loop in computations(text):
        starts: dict[str, int] = {}
        for index, line in enumerate(lines):
            found = re.match(
                r"\s*(?:ROOT )?%(\S+) = (.*?) (all-gather|reduce-scatter)(-start|-done)?\((.*)",
                line,
            )
            if found is None:
                continue
            name, shapes, op, half, rest = found.groups()
            if half == "-start":
                starts[name] = index
                continue
            start = re.search(r"%([\w.\-]+)\)", rest) if half else None
            between = lines[starts[start.group(1)] + 1 : index] if start else []
            hidden = any(map(is_product, between))
            size = nbytes(shapes) * times * (num_devices if op == "reduce-scatter" else 1)
            counts[op].update({
                "bytes": size, "hidden_bytes": size * hidden,
                "in_loops": is_layer_loop, "hidden_in_loops": is_layer_loop and hidden,
            })  # fmt: skip
    return {op: dict(count) for op, count in counts.items()}


def computations(text: str) -> Iterator[tuple[list[str], int, bool]]:
    """Lines of the entry and of every loop's body, how often it runs, and if it has no loop inside."""
    named = {}
    for computation in re.split(r"\n(?=%|ENTRY)", text):
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+)", computation):
            named[header.group(1)] = computation
    waiting = [(name, 1) for name, c in named.items() if c.startswith("ENTRY")]
    while waiting:
        name, times = waiting.pop()
        lines = named[name].splitlines()
        loops = [line for line in lines if " while(" in line]
        for line in loops:
            body = re.search(r"body=%([\w.\-]+)", line)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            assert body is not None, line
            assert trips is not None, line
            waiting.append((body.group(1), times * int(trips.group(1))))
        yield lines, times, not loops and not named[name].startswith("ENTRY")


def is_product(line: str) -> bool:
    """Whether an instruction is a matrix product: by a Triton kernel or a library."""
    return bool(re.match(r"\s*%gemm_fusion", line)) or "__triton_gemm" in line or "__cublas" in line


def nbytes(shapes: str) -> int:
    """Bytes of the arrays in an instruction's type."""
    sizes = {"bf16": 2, "f16": 2, "f32": 4}
    return sum(
        sizes[dtype] * math.prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in re.findall(r"(bf16|f16|f32)\[([\d,]*)\]", shapes)
    )


def main() -> None:
    global num_layers, dim, num_heads
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="a multiple of 8")
    parser.add_argument("--accumulate", type=int, default=4, help="microbatches")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--policies", default="", help="a regular expression: only these")
    parser.add_argument("--pipelined", action="store_true", help=f"XLA_FLAGS {pipelining}")
    parser.add_argument("--layers", type=int, default=num_layers)
    parser.add_argument("--dim", type=int, default=dim, help="width; heads have 64")
    args = parser.parse_args()
    size = f"-{args.layers}x{args.dim}" * ((args.layers, args.dim) != (num_layers, dim))
    num_layers, dim, num_heads = args.layers, args.dim, args.dim // 64
    jax.config.update("jax_platforms", "cpu")
    flags = ["--xla_gpu_autotune_level=0", *([pipelining] if args.pipelined else [])]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    mesh = h200s(args.devices)
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")},
        "target": f"{args.devices} x H200, compiled ahead of time",
        "model": f"scanned + remat, {num_layers} layers, dim {dim}, context {context}, bf16 compute",
        "rows_per_microbatch": rows_per_microbatch,
        "accumulate": args.accumulate,
    }
    print(
        f"{'policy':36} all-gather  reduce-scatter   at rest  temporary    peak (GiB)  "
        "hidden in loops: gathers, reductions; of all bytes"
    )
    for name, options in policies.items():
        if not re.search(args.policies, name):
            continue
        result[name] = found = measure(mesh, args.accumulate, options)
        gib = [found[key] / 2**30 for key in ("at_rest_bytes", "temporary_bytes", "peak_bytes")]
        print(
            f"{name:36} {found['all_gather_psi']:6.2f} Psi {found['reduce_scatter_psi']:11.2f} Psi"
            f" {gib[0]:9.2f} {gib[1]:10.2f} {gib[2]:7.2f}          "
            + ", ".join(
                f"{n.get('hidden_in_loops', 0)} of {n.get('in_loops', 0)}"
                for n in found["schedule"].values()
            )
            + "; "
            + ", ".join(
                f"{n['hidden_bytes'] / n['bytes']:.0%}" if n else "-"
                for n in found["schedule"].values()
            ),
            flush=True,
        )
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"{result['date']}-{args.devices}-accumulate-{args.accumulate}{size}"
    path = args.out / f"{name}{'-pipelined' * args.pipelined}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
