"""What the training scripts share: settings, command line, and the report."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

import data
import jzero

# Where jzero is installed without this repository, `experiments` is on no path.
sys.path.append(str(Path(__file__).parents[2]))
from experiments.shared import pictures, records
from experiments.shared.devices import use_virtual_devices

# ---------------------------------------------------------------------------------------------
# model: a byte-level GPT, pre-LN, learned positions, the embedding also being the output layer
vocab_size = 256
context = 128  # bytes that the model sees
num_layers = 3
num_heads = 4
dim = 128
compute_dtype = jnp.float32  # bfloat16 on an accelerator; the parameters stay float32

# optimizer: AdamW, linear warm-up, cosine decay, clipping by the global norm
peak_learning_rate = 6e-3
warmup_steps = 50
weight_decay = 0.1
clip_norm = 1.0

# report
held_out_batches = 64
sample_bytes = 600
temperature = 0.7
# ---------------------------------------------------------------------------------------------

HERE = Path(__file__).parent
OFFLOAD: dict[str, Callable[..., Any]] = {
    "none": jzero.NoOffload,
    "pinned": jzero.PinnedHost,
    "host": jzero.HostCPU,
}

# Where launchers say how many processes they started: by hand, mpirun, srun.
PROCESS_COUNTS = ("JAX_NUM_PROCESSES", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def connect() -> int:
    """Joins the other processes, if several were started; how many. Before JAX touches a device.

    Started by mpirun or srun, JAX finds the others by itself. Started by hand, it reads only the
    coordinator's address from the environment.
    """
    num_processes = max(int(os.environ.get(name, 1)) for name in PROCESS_COUNTS)
    if num_processes > 1:
        jax.distributed.initialize(
            num_processes=number_in("JAX_NUM_PROCESSES"),
            process_id=number_in("JAX_PROCESS_ID"),
            heartbeat_timeout_seconds=30,  # how long the others wait for one that was killed
        )
    return num_processes


def number_in(variable: str) -> int | None:
    return int(os.environ[variable]) if variable in os.environ else None


def is_first_process() -> bool:
    """Whether to print and to write files: one process does it for all."""
    return jax.process_index() == 0


def parse_args(
    description: str | None, out: Path, steps: int = 1000, choose_stage: bool = True
) -> argparse.Namespace:
    """Reads the command line, joins the other processes and sets up virtual devices.

    Call it before JAX touches a device.
    """
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    if choose_stage:
        add("--stage", type=int, default=3, choices=range(4), help="ZeRO stage")
    add("--devices", type=positive, help="default: all accelerators, or 8 virtual CPU devices")
    add("--steps", type=positive, default=steps, help="optimizer steps")
    add("--batch-size", type=positive, default=16, help="sequences per step, over all devices")
    add("--seed", type=int, default=0, help="of parameters, batches and sample")
    add("--learning-rate", type=float, default=peak_learning_rate, help="at its peak")
    if choose_stage:
        add("--microbatches", type=positive, default=1, help="per step and device")
        add("--reduce", choices=["once", "each"], help="gradients of microbatches (stage 3)")
        add("--gather", choices=["per_pass", "keep", "once_per_step"], help="parameters (stage 3)")
        add(
            "--reduce-dtype", choices=["float32", "bfloat16"], help="in which gradients are reduced"
        )
        add("--nodes", type=positive, default=1, help="stage 3 keeps parameters inside each node")
        add("--bfloat16-params", action="store_true", help="with float32 masters in the optimizer")
        add("--offload", default="none", choices=OFFLOAD, help="where optimizer state rests")
        add("--device-bytes", type=positive, help="of it on each device at a time (pinned)")
        add("--delayed", action="store_true", default=None, dest="delayed_update",
            help="update while the devices compute the next step (host)")  # fmt: skip
        add("--delay-after", type=int, help="steps that are not delayed (host)")
        add("--ratio", type=share, help="of it on the host, from 0 to 1, or auto (host)")
        add("--checkpoints", type=Path, help="folder to save to, and to go on from")
        add("--save-every", type=positive, default=100, help="steps between checkpoints")
    add("--out", type=Path, default=HERE / out, help="folder for the results")
    args = parser.parse_args()
    try:
        offload_policy(args)
    except (TypeError, jzero.OptionError) as error:  # a TypeError: of another policy
        parser.error(f"--offload {args.offload}: {error}")
    num_processes = connect()
    use_virtual_devices(max((args.devices or 8) // num_processes, 1), num_processes)
    num_devices = args.devices or jax.device_count()
    if num_devices > jax.device_count():
        parser.error(f"--devices {num_devices}: there are {jax.device_count()} {jax.devices()}")
    if num_processes > 1 and num_devices != jax.device_count():
        parser.error(f"--devices {num_devices}: {num_processes} processes use all {jax.devices()}")
    if args.batch_size % num_devices:
        parser.error(f"--batch-size {args.batch_size} does not divide by {num_devices} devices")
    return args


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def share(text: str) -> float | str:
    return text if text == "auto" else float(text)


def environment(num_devices: int | None) -> dict[str, Any]:
    """The date, versions and hardware that every result is recorded with."""
    packages = ["jax", "jaxlib", "flax", "optax", "numpy"]
    return records.environment(*packages, num_devices=num_devices)


def sharding_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line says to `jzero.shard_train_step`."""
    devices = jax.devices()[: args.devices]
    options: dict[str, Any] = {"stage": args.stage, "memory": offload_policy(args)}
    if vars(args).get("nodes", 1) > 1:
        shape = (args.nodes, len(devices) // args.nodes)
        options["mesh"] = jax.make_mesh(shape, ("node", "local"), devices=devices)
        options["axes"] = jzero.Axes(params="local" if args.stage == 3 else None)
    else:
        options["mesh"] = jax.make_mesh((len(devices),), ("data",), devices=devices)
    num = vars(args).get("microbatches", 1)
    options["microbatches"] = jzero.Microbatches(num, **given(args, "reduce"))
    return options | {"comm": jzero.Comm(**given(args, "gather", "reduce_dtype"))}


def offload_policy(args: argparse.Namespace) -> jzero.NoOffload | jzero.PinnedHost | jzero.HostCPU:
    """Where the command line wants optimizer state to rest."""
    options = given(args, "device_bytes", "delayed_update", "delay_after", "ratio")
    return OFFLOAD[vars(args).get("offload", "none")](**options)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those of the options that the command line has."""
    return {name: vars(args)[name] for name in names if vars(args).get(name) is not None}


def cast_params(args: argparse.Namespace, params: Any) -> Any:
    """The parameters in the dtype in which they rest."""
    dtype = jnp.bfloat16 if vars(args).get("bfloat16_params") else jnp.float32
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    tx = adamw(args.steps, vars(args).get("learning_rate", peak_learning_rate))
    return jzero.master_weights(tx) if vars(args).get("bfloat16_params") else tx


def adamw(steps: int, learning_rate: float) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=min(warmup_steps, steps // 2),
        decay_steps=max(steps, 2),
        end_value=learning_rate / 20,
    )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b2=0.98, weight_decay=weight_decay),
    )


def next_byte_loss(logits_fn: Callable[[jax.Array], jax.Array], batch: jax.Array) -> jax.Array:
    """Mean cross entropy in nats per byte; `batch` is uint8[batch, context + 1]."""
    tokens = batch.astype(jnp.int32)
    logits = logits_fn(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def report(
    args: argparse.Namespace,
    text: data.Text,
    losses: Sequence[float],
    tokens_per_second: float,
    held_out: float,
    sample: tuple[str, str],
) -> None:
    """Writes loss.png, sample.txt and held_out.json, and prints.

    `losses` are those of all steps, in nats per byte; `sample` is a prompt and what the model made of it.
    """
    prompt, continuation = sample
    plot_loss(args.out / "loss.png", losses, held_out, args)
    (args.out / "sample.txt").write_text(f"{prompt}{continuation}\n")
    numbers = {**environment(args.devices), "held_out_loss_nats_per_byte": held_out}
    records.write(args.out / "held_out.json", numbers)

    console = Console(highlight=False)
    console.rule("sample: the beginning of a held-out file (dim), continued by the model")
    console.print(prompt, style="dim", markup=False, end="")
    console.print(continuation, markup=False)
    console.rule("result")
    console.print(
        f"{args.steps} steps at {tokens_per_second:,.0f} tokens/s\n"
        f"training loss {np.mean(losses[-20:]):.3f} nats/byte (mean of the last 20 steps)\n"
        f"held-out loss {held_out:.3f} nats/byte ({text.num_files[1]} files never trained on)\n"
        f"metrics.csv, held_out.json, loss.png and sample.txt are in {os.path.relpath(args.out)}"
    )


def held_out_loss(
    text: np.ndarray,
    apply: Callable,
    step: jzero.ShardedStep,
    state: Any,
    args: argparse.Namespace,
) -> float:
    @jzero.shard_eval_step(like=step)
    def loss_fn(state: Any, batch: Any) -> jax.Array:
        return next_byte_loss(partial(apply, state), batch)

    batches = data.Windows(text, args.batch_size, context + 1, args.seed)
    return float(np.mean([loss_fn(state, next(batches)) for _ in range(held_out_batches)]))


def sample(
    text: np.ndarray, apply: Callable, step: jzero.ShardedStep, state: Any, seed: int
) -> tuple[str, str]:
    """Continues the beginning of `text`, one byte at a time over a sliding window."""

    @jzero.shard_eval_step(like=step, in_specs={"window": jax.P()})
    def generate(state: Any, window: Any, key: jax.Array) -> jax.Array:
        def next_byte(window: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = apply(state, window[None])[0, -1].astype(jnp.float32)
            byte = jax.random.categorical(key, logits / temperature)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(next_byte, window, jax.random.split(key, sample_bytes))[1]

    prompt = text[:context]
    output = generate(state, prompt.astype(np.int32), jax.random.key(seed))
    return _decode(prompt), _decode(np.asarray(output, np.uint8))


def _decode(text: np.ndarray) -> str:
    return text.tobytes().decode("utf-8", errors="replace")


def plot_loss(
    path: Path, losses: Sequence[float], held_out: float, args: argparse.Namespace
) -> None:
    with pictures.drawn(path, figsize=(8, 4.5)) as (_, axes):
        window = min(20, len(losses))
        smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
        axes.plot(losses, color="#90caf9", linewidth=0.8, label="training batch")
        axes.plot(
            range(window - 1, len(losses)), smooth, color="#0d47a1", label=f"mean of {window} steps"
        )
        axes.plot(len(losses), held_out, "o", color="#e65100", label=f"held-out: {held_out:.2f}")
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.set_title(f"byte-level GPT, ZeRO stage {args.stage}")
        axes.grid(alpha=0.3)
        axes.legend()
