"""Bundles of programs, side by side in one step, against one device with the whole batch.

Programs of a bundle share a setting and a step: what any step costs is paid once, and each is checked beside
strangers. Each is judged by its own leaves. What is refused is found by planning, and left out; what fails
or differs runs again alone. A program with casts to narrower floats is trained without them, too, and that
twin has no tolerance to hide in.
"""

import dataclasses
import functools
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero

from .._setting import Setting
from . import noise, programs, settings
from .programs import NUM_STEPS, Program

BUNDLE = 10
# Why a program may be refused: the name by which it is counted, and what the message says.
REFUSALS = {
    "microbatches need all rows at once": "accumulate > 1, and .* is needed",
    "microbatches would run in too many loops": "accumulate > 1, and .* begins a loop over the microbatches",
    "microbatches use a gradient where they compute it": "accumulate > 1, and .* uses a gradient, loss",
    "microbatches do not divide an output's rows": "accumulate > 1, and .* microbatches of all devices do",
    "nothing to offload": "the state has no optimizer state that is worth it",
    "the host takes part in no collective": "processors take part in no collective",
    "the host's part is too small": "are the fewest leaves that are updated together",
}
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
# Float64 has digits to spare, whatever is further apart is another training; what passes through a
# narrower float is compared as that.
RTOL = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 3e-2, "float16": 1e-2}
# Noise is what differs by no more than so many times what rounding moves it on one device: in so many trials
# of random rounding, and with sums in so many parts.
NOISE_FACTOR, NOISE_TRIALS, NOISE_PARTS = 4, 8, (2, 3)


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one seed: 'equal', 'refused', 'noisy' or 'differs'; and of the last three why."""

    seed: int
    verdict: str
    why: str = ""
    listing: str = ""


def setting_of(seed: int) -> Setting:
    """How the seed's bundle is sharded."""
    return settings.draw(seed // BUNDLE)


def program_of(seed: int, setting: Setting | None = None) -> Program:
    """The seed's program: in a setting that refuses much, all but the first of a bundle are gentle."""
    setting = setting or setting_of(seed)
    gentle = setting.refuses_much and seed % BUNDLE > 0
    return programs.draw(seed, setting.rows, gentle, setting.dtype)


def bundles(seeds: range) -> list[range]:
    """The seeds in parts that share a setting."""
    starts = sorted({seeds[0], *(s for s in seeds if s % BUNDLE == 0)})
    return [range(a, b) for a, b in zip(starts, [*starts[1:], seeds[-1] + 1], strict=True)]


def check(seeds: Sequence[int], setting: Setting | None = None) -> list[Result]:
    """The results of seeds of one bundle, checked side by side."""
    setting = setting or setting_of(seeds[0])
    return compare([program_of(seed, setting) for seed in seeds], setting)


def compare(drawn: list[Program], setting: Setting) -> list[Result]:
    """The results of programs of one setting, checked side by side."""
    with (
        jax.enable_x64(setting.dtype == "float64"),
        jax.numpy_rank_promotion("allow"),
        settings.codes_that_round_nothing(),
    ):
        found = judge(drawn, functools.partial(shard, setting))
    return [
        dataclasses.replace(r, listing=f"{setting}\n{p.source}")
        for r, p in zip(found, drawn, strict=True)
    ]


def shard(setting: Setting, step: Any) -> Any:
    """The step `(state, b, t, w)`: rows lie along dim 0 of `b` and along dim 1 of `t`."""
    return setting.shard(step, {"t": jax.P(None, setting.names), "w": jax.P()})


def judge(drawn: list[Program], shard: Callable[[Any], Any]) -> list[Result]:
    """The results of programs, trained together as far as that is possible, with their wide twins."""
    twins = {i: program.wide for i, program in enumerate(drawn) if program.wide}
    found = _judge([*drawn, *twins.values()], shard)
    for i, twin in zip(twins, found[len(drawn) :], strict=True):
        if twin.verdict == "differs":
            found[i] = dataclasses.replace(twin, why=f"without its casts, {twin.why}")
    return found[: len(drawn)]


def _judge(drawn: list[Program], shard: Callable[[Any], Any]) -> list[Result]:
    try:
        actual = train(drawn, shard(together(drawn)))
    except Exception as error:
        if len(drawn) == 1:
            return [_raised(drawn[0], error)]
        return _without_refused(drawn, shard)
    expected = train(drawn, jax.jit(together(drawn)))
    results = []
    for i, program in enumerate(drawn):
        found = difference(actual[i], expected[i], program.narrow)
        if found is None:
            results.append(Result(program.seed, "equal"))
        elif len(drawn) > 1:  # alone, so that what is reported can be run again
            (alone,) = _judge([program], shard)
            why = f"only beside others, {found}"
            results.append(
                Result(program.seed, "differs", why) if alone.verdict == "equal" else alone
            )
        else:
            own = noise_of(program, expected[i])
            beyond = difference(actual[i], expected[i], program.narrow, own)
            results.append(Result(program.seed, "differs" if beyond else "noisy", beyond or found))
    return results


def _without_refused(drawn: list[Program], shard: Callable[[Any], Any]) -> list[Result]:
    """Sorts out what is refused, which takes no compiling, and goes on with the rest."""
    results: dict[int, Result] = {}
    for i, program in enumerate(drawn):
        try:
            b, t, w = ([batch] for batch in program.batches[0])
            shard(together([program])).plan([program.make_state()], b, t, w)
        except Exception as error:
            results[i] = _raised(program, error)
    rest = [i for i in range(len(drawn)) if i not in results]
    if len(rest) == len(drawn):  # refused together, or not before it is compiled
        parts = [[i] for i in rest]
    else:
        parts = [rest] if rest else []
    for part in parts:
        results |= zip(part, _judge([drawn[i] for i in part], shard), strict=True)
    return [results[i] for i in range(len(drawn))]


def _raised(program: Program, error: Exception) -> Result:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, jzero.JzeroError):
        for name, pattern in REFUSALS.items():
            if re.search(pattern, str(error), re.DOTALL):
                return Result(program.seed, "refused", name)
        return Result(program.seed, "differs", f"refused for no listed reason: {text}")
    where = "".join(traceback.format_tb(error.__traceback__)[-4:])
    return Result(program.seed, "differs", f"{text}\n{where}")


def together(drawn: Sequence[Program]) -> Callable[..., Any]:
    """The programs side by side in one step."""

    def step(states: Any, b: Any, t: Any, w: Any) -> Any:
        each = [p.step(*parts) for p, *parts in zip(drawn, states, b, t, w, strict=True)]
        return [new for new, _ in each], [outputs for _, outputs in each]

    return step


def train(drawn: Sequence[Program], step: Callable[..., Any]) -> list[Any]:
    """For each program the outputs of each step and the last state, as NumPy arrays."""
    state = [p.make_state() for p in drawn]
    outputs = []
    for i in range(NUM_STEPS):
        b, t, w = ([p.batches[i][k] for p in drawn] for k in range(3))
        state, out = step(state, b, t, w)
        outputs.append(out)
    trained = [([out[i] for out in outputs], part) for i, part in enumerate(state)]
    return jax.tree.map(_to_numpy, trained)


def difference(
    actual: Any, expected: Any, narrow: str, own_noise: dict[Any, float] | None = None
) -> str | None:
    """Which leaf differs most, and by how many times what it may; None if none does by more than noise."""
    found, wanted = (jax.tree.leaves_with_path(tree) for tree in (actual, expected))
    if [path for path, _ in found] != [path for path, _ in wanted]:
        return "other leaves"
    worst = (1.0, "")
    for (path, a), (_, d) in zip(found, wanted, strict=True):
        if (a.shape, a.dtype) != (d.shape, d.dtype):
            return f"{jax.tree_util.keystr(path)} is {a.dtype}{a.shape}, not {d.dtype}{d.shape}"
        excess = _excess(a, d, narrow)
        if excess > max(worst[0], NOISE_FACTOR * (own_noise or {}).get(path, 0)):
            text = f"{jax.tree_util.keystr(path)} is {excess:.3g} tolerances off"
            worst = (excess, f"{text}:\n{a}\ninstead of\n{d}" if a.size <= 16 else text)
    return worst[1] or None


def _excess(a: np.ndarray, d: np.ndarray, narrow: str) -> float:
    if not jnp.issubdtype(d.dtype, jnp.floating):
        return 0.0 if np.array_equal(a, d) else np.inf
    rtol = max(RTOL[narrow], RTOL[str(d.dtype)])
    a, d = a.astype(np.float64), d.astype(np.float64)
    finite = np.isfinite(d)
    if not np.array_equal(a[~finite], d[~finite], equal_nan=True):
        return np.inf
    apart, size = np.abs(a[finite] - d[finite]), np.abs(d[finite])
    excess = float(np.max(apart, initial=0)) / (rtol * float(np.max(size, initial=0)) + rtol * 1e-3)
    return excess if np.isfinite(excess) else np.inf


def noise_of(program: Program, expected: Any) -> dict[Any, float]:
    """By how many tolerances rounding moves each leaf on one device, compiled with optimizations.

    The sign of what is zero but for rounding, a tie, a narrow float's next value; or a fault of the
    compiler: XLA:CPU without optimizations makes NaN of some sums of complex numbers (JAX 0.10.2).
    """
    step = together([program])
    jit = functools.partial(jax.jit, compiler_options=OPTIMIZED)
    rounded = jit(noise.randomly_rounded(step))
    others: list[Callable[..., Any]] = [
        *(functools.partial(rounded, noise.signs(trial)) for trial in range(NOISE_TRIALS)),
        *(jit(noise.summed_in_parts(step, num_parts)) for num_parts in NOISE_PARTS),
    ]
    moved = dict.fromkeys((path for path, _ in jax.tree.leaves_with_path(expected)), 0.0)
    for other in others:
        (found,) = train([program], other)
        for (path, a), d in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            moved[path] = max(moved[path], _excess(a, d, program.narrow))
    return moved


def _to_numpy(leaf: Any) -> np.ndarray:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)
