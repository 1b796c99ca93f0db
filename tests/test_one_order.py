"""On CPUs the collectives of a program are in one order by what they read.

XLA:CPU keeps no other. Two that may run at once must stand side by side: a loop or branch with collectives
has to be over, and those before it done (docs/facts.md#loops-with-collectives-are-overtaken).
"""

import collections
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jzero
import small
from jzero.segments import _planned
from jzero.sharding.analysis import _residuals

LAYERS, WIDTH, ROWS = 4, 16, 16
COLLECTIVES = {"all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"}
LINE = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = .*? ([a-z][a-z-]*)\((.*)$")
CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%[\w.-]+|_computations=\{[^}]*\}")


def computations(hlo):
    """Of each computation of a compiled program: `[(name, opcode, operands, computations that it calls)]`."""
    found: dict[str, list[tuple[str, str, list[str], list[str]]]] = {}
    for line in hlo.splitlines():
        if start := re.match(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            body = found.setdefault(start[1], [])
        elif parts := LINE.match(line):
            name, opcode, rest = parts.groups()
            operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
            called = re.findall(r"%([\w.-]+)", " ".join(CALLED.findall(rest)))
            body.append((name, opcode, operands, called))
    return found


def out_of_order(hlo):
    """Pairs of a compiled program, one a loop or branch with collectives, that nothing orders."""
    found = computations(hlo)

    def meets(computation):
        return any(op.removesuffix("-start") in COLLECTIVES or any(map(meets, called))
                   for _, op, _, called in found[computation])  # fmt: skip

    pairs = []
    for body in found.values():
        before: dict[str, set[str]] = collections.defaultdict(set)
        seen: list[tuple[str, bool]] = []
        for name, op, operands, called in body:
            before[name] = {*operands, *(x for operand in operands for x in before[operand])}
            nests = any(map(meets, called))
            if op.removesuffix("-start") in COLLECTIVES or nests:
                pairs += [(other, name) for other, one in seen
                          if (one or nests) and other not in before[name]]  # fmt: skip
                seen.append((name, nests))
    return pairs


def turn(h, x):
    i, w = x
    return jnp.where(i % 2 == 0, jnp.tanh(h @ w), h * 0.5), None


def group(h, ws):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, ws)


MODELS = {
    "by index": lambda w, h: jax.lax.scan(turn, h, (jnp.arange(LAYERS), w))[0],
    "plain": lambda w, h: group(h, w)[0],
    "nested": lambda w, h: jax.lax.scan(group, h, w.reshape(2, LAYERS // 2, WIDTH, WIDTH))[0],
    "two stacks": lambda w, h: group(group(h, w[:2])[0], w[2:])[0],
    "branch": lambda w, h: jax.lax.scan(
        lambda h, x: (jax.lax.cond(x[0] % 2 == 0, lambda: h @ x[1], lambda: h), None),
        h, (jnp.arange(LAYERS), w),
    )[0],
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "no options": {},
    "accumulate": {"accumulate": 2},
    "no prefetch": {"prefetch_bytes": 0},
    "activations": {"offload_activations": jzero.PinnedHost()},
    "microbatches": {"offload_activations": jzero.PinnedHost(), "accumulate": 2},
    "stage 1": {"offload_activations": jzero.PinnedHost(), "stage": 1},
    "tiles": {"offload_activations": jzero.PinnedHost(), "tile_bytes": 256},
}


def compiled(model, **options):
    def step(params, x):
        def loss_fn(params):
            h = model(params["layers"], x @ params["enters"])
            return jnp.mean((h @ params["leaves"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / norm, params, grads), loss

    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"enters": (WIDTH, WIDTH), "layers": (LAYERS, WIDTH, WIDTH), "leaves": (WIDTH, WIDTH)}
    params = {name: jax.random.normal(key, shape) / 4
              for key, (name, shape) in zip(keys, shapes.items(), strict=True)}  # fmt: skip
    train_step = small.shard_train_step(step, **options)
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    text = train_step.lower(train_step.shard(params, x), x).compile().as_text()
    assert isinstance(text, str)
    return text


@pytest.mark.slow(but=["branch-microbatches"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_loops_with_collectives_run_alone(model, options, monkeypatch):
    monkeypatch.setattr(_residuals, "LEAST_BYTES", 0)
    assert out_of_order(compiled(MODELS[model], **OPTIONS[options])) == []


@pytest.mark.slow
def test_xla_drops_the_order_that_barriers_make(monkeypatch):
    """Should this fail, jzero needs no order of its own on CPUs."""
    monkeypatch.setattr(_planned, "_on_cpus", lambda mesh: False)
    assert out_of_order(compiled(MODELS["by index"], **OPTIONS["activations"])) != []
