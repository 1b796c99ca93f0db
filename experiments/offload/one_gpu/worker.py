"""One measurement in a process of its own; prints what is known so far, as a line of JSON, after each phase.

python experiments/offload/one_gpu/worker.py --layers 24 --dim 2048 --policy host --rows 8 32
... --preflight h100    # compiles for one, with JAX_PLATFORMS=cpu in the environment

Whoever reads takes the last line: a process that is killed or runs out of time or memory loses only what it
had not reached. `status` is 'ok' at the end, 'no device memory' or 'no host memory' if that ended it.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import jzero
from experiments.shared import speed
from experiments.shared.gpt import make_step
from jzero._quantities import readable_size
from model import GPT, TX, of_size

POLICIES: dict[str, Any] = {
    "jit": None,  # the same step under jax.jit, its state donated
    "stage 1": jzero.NoOffload(),
    "stage 3": jzero.NoOffload(),
    "pinned": jzero.PinnedHost(),
    "host": jzero.HostCPU(),
    "delayed": jzero.HostCPU(delayed_update=True, delay_after=1),
    "half": jzero.HostCPU(ratio=0.5),
    "auto": jzero.HostCPU(ratio="auto"),
    # Parameters rest on the host, too, and layers visit the device: see `held`.
    "layers": jzero.HostCPU(),
    "activations": jzero.HostCPU(),  # ... and inputs of layers wait on the host
    "turns": None,  # ... and optimizer state visits the device in turns: all that there is crosses
    "nvme": None,  # in files of the folder that DISK names
}
LAYERED = ("layers", "activations", "turns")
GROUPS = 3  # of steps that are timed together


class Log:
    """What is known so far."""

    def __init__(self, **known: Any):
        self.known = known
        self._start = time.perf_counter()

    def __call__(self, phase: str, **found: Any) -> None:
        now = time.perf_counter()
        phases = self.known.setdefault("phase_seconds", {})
        phases[phase], self._start = round(now - self._start, 2), now
        print(json.dumps(self.known | found), flush=True)
        self.known |= found


def step_of(model: GPT, policy: str) -> Any:
    step = make_step(model.loss, TX)
    if policy == "jit":
        return jax.jit(step, donate_argnums=0)
    stage = 1 if policy == "stage 1" else 3
    return jzero.shard_train_step(step, stage=stage, memory=held(model, policy))


def held(model: GPT, policy: str) -> jzero.Memory:
    """Which memory holds what."""
    window = jzero.PinnedHost(model.window)
    if policy == "nvme":
        return jzero.Memory(optimizer=jzero.NVMe(tempfile.mkdtemp(dir=os.environ["DISK"])))
    if policy not in LAYERED:
        return jzero.Memory(optimizer=POLICIES[policy])
    return jzero.Memory(
        params=window,
        optimizer=POLICIES[policy] or window,
        activations=jzero.PinnedHost() if policy == "activations" else jzero.NoOffload(),
    )


def transferred(step: Any, *args: Any) -> dict[str, Any]:
    """Bytes that a call copies between device, host and disk, by direction."""
    if not isinstance(step, jzero.ShardedStep):
        return {}
    found = dict.fromkeys(("to host", "to device", "from disk", "to disk"), 0)
    for x in step.describe(*args).transfers:
        found[x.direction] += x.nbytes
    return {"transfer_bytes": found}


def at_rest(step: Any, state: Any, tokens: Any) -> dict[str, Any]:
    """Bytes that the plan says rest where."""
    if not (isinstance(step, jzero.ShardedStep) and step.trains):
        return {}
    plan = step.plan(state, tokens)
    tiers = sorted({leaf.tier for leaf in plan.leaves})
    return {"at_rest_bytes": {tier: plan.nbytes_at_rest(tier=tier) for tier in tiers}}


def memory() -> dict[str, Any]:
    """Of the device by the runtime's count, where it counts, and this process's largest on the host."""
    stats = jax.devices()[0].memory_stats() or {}
    names = ("peak_bytes_in_use", "bytes_in_use", "bytes_limit")
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {name: stats.get(name) for name in names} | {"host_peak_bytes": host}


def timed(
    step: Any, state: Any, tokens: Any, seconds: float, log: Callable[..., None]
) -> tuple[Any, dict[str, Any]]:
    """Seconds per step, groups of steps timed together: their ends wait, steps within a group do not."""

    loss: Any = None

    def run(num: int) -> float:
        nonlocal state, loss
        start = time.perf_counter()
        for _ in range(num):
            state, loss = step(state, tokens)
        jax.block_until_ready((state, loss))
        return (time.perf_counter() - start) / num

    first = run(1)
    log("first step", first_step_seconds=first)
    warm = run(2)
    # By now all policies have made as many steps: it shows that they train alike (a delayed one is behind).
    third_loss = float(loss)
    log("third step", third_step_seconds=warm, third_loss=third_loss)
    num = min(20, round(seconds / GROUPS / warm))
    # Steps so slow that these two were time enough, as through a slow disk.
    found = [run(max(2, num)) for _ in range(GROUPS)] if num else [warm]
    return state, {
        "first_step_seconds": first, "third_loss": third_loss,
        "step_seconds": statistics.median(found), "step_seconds_all": found,
    }  # fmt: skip


def measure(args: argparse.Namespace, log: Log) -> None:
    model = of_size(args.layers, args.dim, args.vocab, args.context, args.unrolled)
    step, shapes = step_of(model, args.policy), jax.eval_shape(model.init)
    # It also tells where to make the state.
    known = at_rest(step, shapes, model.batch(args.rows[0]))
    log("plan", parameters=model.num_params, **known)
    # Files have two versions of all that rests there.
    needs, disk = 2 * known.get("at_rest_bytes", {}).get("nvme", 0), os.environ.get("DISK", ".")
    if (free := shutil.disk_usage(disk).free) < 1.3 * needs:
        told = f"files take {readable_size(needs)}, the disk has {readable_size(free)}"
        return log("disk", status="left out", told=told)
    init = step.init if isinstance(step, jzero.ShardedStep) else lambda f: jax.jit(f)()
    state = jax.block_until_ready(init(model.init))
    log("init", after_init=memory())
    runs: list[dict[str, Any]] = []
    for rows in args.rows:
        state, found = timed(step, state, model.batch(rows), args.seconds, log)
        if args.policy == "delayed":  # What waits belongs to a program for so many rows.
            state = jax.block_until_ready(step.flush(state))
        tokens = rows * model.context / found["step_seconds"]
        flops = model.flops_per_token
        rates = {"tokens_per_second": tokens, "tflops": tokens * flops / 1e12}
        rates["mfu"] = speed.utilization(tokens, flops, jax.devices()[:1])
        crossed = transferred(step, shapes, model.batch(rows))
        runs.append({"rows": rows, **found, **rates, **crossed, **memory()})
        log(f"{rows} rows", runs=runs)
    log("end", status="ok")


def preflight(args: argparse.Namespace, log: Log) -> None:
    """The peak that `jzero.preflight` predicts for one such GPU, of which none need be here."""
    model = of_size(args.layers, args.dim, args.vocab, args.context, args.unrolled)
    step, target = step_of(model, args.policy), args.preflight
    shapes = jax.eval_shape(model.init), jax.eval_shape(lambda: model.batch(args.rows[0]))
    if args.policy == "jit":
        whole = jax.NamedSharding(jzero.target_mesh(target, "1x1"), jax.P())
        step = step.lower(*jax.tree.map(lambda x: x.update(sharding=whole), shapes))
        shapes = ()  # type: ignore[assignment]
    found = jzero.preflight(step, *shapes, target=target, topology="1x1")
    log("end", status="ok", parameters=model.num_params, preflight_peak_bytes=found.peak_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--unrolled", action="store_true")
    parser.add_argument("--policy", choices=POLICIES, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[8])
    parser.add_argument("--seconds", type=float, default=6.0, help="of timed steps, about")
    parser.add_argument("--preflight", metavar="TARGET", help="compile for it, and run nothing")
    args = parser.parse_args()
    run(preflight if args.preflight else measure, args)


def run(measure: Callable[[argparse.Namespace, Log], None], args: argparse.Namespace) -> None:
    """Measures, and says so if there was not the memory, or a package, for it."""
    log = Log(**vars(args))
    log("start", device=jax.devices()[0].device_kind)
    try:
        measure(args, log)
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        log("failure", status=f"no {short_of(text)} memory", error=text[:600], **memory())
    except ImportError as error:
        log("failure", status="left out", told=str(error)[:300])
    except (MemoryError, jzero.OptionError) as error:
        if isinstance(error, jzero.OptionError) and "the host's memory" not in str(error):
            raise
        log("failure", status="no host memory", error=str(error)[:600], **memory())
    os._exit(0)  # Whatever may hang or crash at the end of the process has nothing to say.


def short_of(text: str) -> str:
    """Which memory an error of XLA's is about: host memory, a pinned host buffer, xla_gpu_host_bfc, ..."""
    return "host" if re.search(r"host memory|pinned host|host_bfc", text.lower()) else "device"


if __name__ == "__main__":
    main()
