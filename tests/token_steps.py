"""Train steps over tokens `[B, S]`, in float64; none says anything of devices.

`STEPS[name]()` is `(init, step, batch, specs)`: `specs` are of the batch, whose rows are over the axis "rows"
and whose tokens are over "context".
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import P, lax

from partition_steps import FLOAT, normal, rms_norm, rope, rows, trained, xent

B, S, WIDTH, HEADS, VOCAB = 16, 16, 16, 8, 32
EACH = WIDTH // HEADS
TX = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))
TOKENS = P("rows", "context")
Step = tuple[Callable[[], Any], Callable[..., Any], Any, Any]


def tokens(num: int = S, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.RandomState(seed).randint(0, VOCAB, (B, num)), jnp.int32)


def shifted(num: int = S) -> dict[str, jax.Array]:
    both = tokens(num + 1)
    return {"x": both[:, :-1], "y": both[:, 1:]}


def weights(seed: int) -> dict[str, jax.Array]:
    shapes = {
        "q": (WIDTH, HEADS, EACH), "k": (WIDTH, HEADS, EACH), "v": (WIDTH, HEADS, EACH),
        "o": (HEADS * EACH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH),
    }  # fmt: skip
    found = {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return {**found, "norms": jnp.ones((2, WIDTH), FLOAT)}


def stacked() -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), weights(0), weights(10))


def model(layers: Callable[[], Any] = stacked, **more: Any) -> Callable[[], Any]:
    def params() -> Any:
        others = {"embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), **more}
        found = {name: normal(90 + i, *shape) for i, (name, shape) in enumerate(others.items())}
        return {**found, "layers": layers()}

    return params


def attention(q, k, v):
    scores = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(EACH)
    at = jnp.arange(q.shape[1])
    scores = jnp.where(at[:, None] >= at[None, :], scores, -1e9)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, -1), v)


def layer(x, p, turned=False):
    h = rms_norm(x, p["norms"][0])
    q, k, v = (jnp.einsum("bsd,dhe->bshe", h, p[name]) for name in "qkv")
    q, k = (rope(q), rope(k)) if turned else (q, k)
    x = x + attention(q, k, v).reshape(*x.shape[:2], -1) @ p["o"]
    return x + jax.nn.gelu(rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]


def scanned(x, layers, turned=False):
    turn = jax.checkpoint(lambda x, p: (layer(x, p, turned), None), prevent_cse=False)
    return lax.scan(turn, x, layers)[0]


def gpt() -> Step:
    """Layers in a scan, each computed again; learned positions, of which the first are read."""

    def loss(p, b):
        x = p["embed"][b["x"]] + p["position"][: b["x"].shape[1]]
        return xent(scanned(x, p["layers"]) @ p["head"], b["y"])

    return *trained(model(position=(2 * S, WIDTH)), loss, shifted(), TX), TOKENS


def gpt_that_shifts() -> Step:
    """Takes S + 1 tokens, and shifts them itself."""

    def loss(p, b):
        x, y = b[:, :-1], b[:, 1:]
        return xent(scanned(p["embed"][x], p["layers"], turned=True) @ p["head"], y)

    return *trained(model(), loss, tokens(S + 1), TX), TOKENS


def gpt_without_the_last() -> Step:
    """Takes S tokens; the logits of the last one are left out. Unrolled, tied."""

    def loss(p, b):
        x = p["embed"][b]
        for i in range(2):
            x = layer(x, jax.tree.map(lambda w: w[i], p["layers"]))  # noqa: B023
        logits = x @ p["embed"].T
        return xent(logits[:, :-1], b[:, 1:])

    return *trained(model(), loss, tokens(), TX), TOKENS


def mlp() -> Step:
    """Of each token alone."""

    def loss(p, b):
        return jnp.mean((jnp.tanh(b["x"] @ p["a"]) @ p["b"] - b["y"]) ** 2)

    def params():
        return {"a": normal(0, 12, 32), "b": normal(1, 32, 12)}

    return *trained(params, loss, {"x": rows(B, S, 12), "y": rows(B, S, 12)}, TX), TOKENS


def recurrent() -> Step:
    """A state that goes along the tokens, as Mamba's: all of them are gathered, or another dim is split."""

    def loss(p, b):
        x = p["embed"][b["x"]]
        u = x @ p["in"]

        def turn(h, now):
            h = jax.nn.sigmoid(p["decay"]) * h + now
            return h, h

        _, hs = lax.scan(turn, jnp.zeros((B, 2 * WIDTH), FLOAT), jnp.swapaxes(u, 0, 1))
        x = x + jax.nn.silu(jnp.swapaxes(hs, 0, 1)) @ p["out"]
        return xent(x @ p["head"], b["y"])

    shapes = {"in": (WIDTH, 2 * WIDTH), "decay": (2 * WIDTH,), "out": (2 * WIDTH, WIDTH)}
    return *trained(model(lambda: {}, **shapes), loss, shifted(), TX), TOKENS


TRANSFORMERS: dict[str, Callable[[], Step]] = {
    make.__name__: make for make in (gpt, gpt_that_shifts, gpt_without_the_last)
}
STEPS = TRANSFORMERS | {"mlp": mlp, "recurrent": recurrent}
