"""How fast a GPT decodes whose weights rest on the host, in a process of its own; prints as worker.py does.

python experiments/offload/one_gpu/decode.py --layers 32 --dim 4096 --policy layers --rows 64 512

Policy `jit` has the weights on the device, under `jax.jit`; with `layers` each turn, which makes a token of
each row, fetches all of them. Greedy, with a cache of `--context` positions on the device.
"""

import argparse
import statistics
import time
from typing import Any

import jax

import jzero
from model import GPT, of_size
from worker import GROUPS, Log, memory, run, transferred


def step_and_params(model: GPT, policy: str) -> tuple[Any, Any]:
    params = jax.block_until_ready(jax.jit(model.init_params)())
    if policy == "jit":
        return jax.jit(model.decode), params
    step = jzero.shard_eval_step(model.decode, memory=jzero.PinnedHost(model.window))
    return step, jax.block_until_ready(step.shard(params))


def timed(step: Any, params: Any, first: jax.Array) -> dict[str, Any]:
    """Seconds per call, of which the first, which compiles, is told apart."""
    found = []
    for _ in range(1 + GROUPS):
        start = time.perf_counter()
        _, logits = jax.block_until_ready(step(params, first))
        found.append(time.perf_counter() - start)
    return {
        "first_call_seconds": found[0], "call_seconds": statistics.median(found[1:]),
        "call_seconds_all": found[1:], "mean_logit": float(logits.mean()),
    }  # fmt: skip


def measure(args: argparse.Namespace, log: Log) -> None:
    model = of_size(args.layers, args.dim, args.vocab, args.context, unrolled=False)
    step, params = step_and_params(model, args.policy)
    log("init", parameters=model.num_params, after_init=memory())
    decodes: list[dict[str, Any]] = []
    for rows in args.rows:
        first = model.batch(rows)[:, 0]
        found = timed(step, params, first)
        rate = rows * model.context / found["call_seconds"]
        crossed = transferred(step, params, first)
        decodes.append(
            {"rows": rows, "turns": model.context, "tokens_per_second": rate}
            | found | crossed | memory()
        )  # fmt: skip
        log(f"{rows} rows", decodes=decodes)
    log("end", status="ok")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--policy", choices=("jit", "layers"), required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[512])
    run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
