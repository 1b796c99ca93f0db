"""Train steps over tokens `[B, S]`, images and sequences, in float64; none says anything of devices.

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

from partition_steps import FLOAT, labels, normal, rms_norm, rope, rows, trained, xent

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


def weights(seed: int, kv: int = HEADS) -> dict[str, jax.Array]:
    shapes = {
        "q": (WIDTH, HEADS, EACH), "k": (WIDTH, kv, EACH), "v": (WIDTH, kv, EACH),
        "o": (HEADS * EACH, WIDTH), "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH),
    }  # fmt: skip
    found = {name: normal(seed + i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return {**found, "norms": jnp.ones((2, WIDTH), FLOAT)}


def stacked(kv: int = HEADS) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), weights(0, kv), weights(10, kv))


def model(layers: Callable[[], Any] = stacked, **more: Any) -> Callable[[], Any]:
    def params() -> Any:
        others = {"embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), **more}
        found = {name: normal(90 + i, *shape) for i, (name, shape) in enumerate(others.items())}
        return {**found, "layers": layers()}

    return params


def by_hand(q, k, v, causal=True):
    scores = jnp.einsum("bshe,bthe->bhst", q, k) / np.sqrt(EACH)
    if causal:
        at = jnp.arange(q.shape[1])
        scores = jnp.where(at[:, None] >= at[None, :], scores, -1e9)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, -1), v)


def grouped(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def layer(x, p, attention=by_hand, turned=False, others=None):
    h = rms_norm(x, p["norms"][0])
    read = h if others is None else others
    q = jnp.einsum("bsd,dhe->bshe", h, p["q"])
    k, v = (jnp.einsum("bsd,dhe->bshe", read, p[name]) for name in "kv")
    q, k = (rope(q), rope(k)) if turned else (q, k)
    x = x + attention(q, k, v).reshape(*x.shape[:2], -1) @ p["o"]
    return x + jax.nn.gelu(rms_norm(x, p["norms"][1]) @ p["up"]) @ p["down"]


def scanned(x, layers, remat=True, **options):
    def turn(x, p):
        return layer(x, p, **options), None

    turn = jax.checkpoint(turn, prevent_cse=False) if remat else turn
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


def llama() -> Step:
    """Rotated positions, grouped queries, `jax.nn.dot_product_attention`."""

    def loss(p, b):
        x = scanned(p["embed"][b["x"]], p["layers"], attention=grouped, turned=True)
        return xent(x @ p["head"], b["y"])

    return *trained(model(lambda: stacked(2)), loss, shifted(), TX), TOKENS


def t5() -> Step:
    """An encoder, and a decoder that reads it; relative positions are looked up in a table."""

    def biased(p):
        at = jnp.arange(S)
        near = jnp.clip(at[:, None] - at[None, :], -3, 3) + 3

        def attention(q, k, v):
            scores = jnp.einsum("bshe,bthe->bhst", q, k) + p["near"][:, near]
            return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, -1), v)

        return attention

    def loss(p, b):
        e = layer(p["embed"][b["source"]], p["layers"]["encoder"], biased(p))
        x = layer(p["embed"][b["x"]], p["layers"]["decoder"], turned=True)
        whole = lambda q, k, v: by_hand(q, k, v, False)  # noqa: E731
        x = layer(x, p["layers"]["cross"], whole, others=e)
        return xent(x @ p["head"], b["y"])

    def layers():
        return {name: weights(10 * i) for i, name in enumerate(("encoder", "decoder", "cross"))}

    batch = {"source": tokens(seed=5), **shifted()}
    return *trained(model(layers, near=(HEADS, 7)), loss, batch, TX), TOKENS


def vit() -> Step:
    """Patches, of which a mean is classified; labels have rows alone."""

    def loss(p, b):
        x = b["x"] @ p["patch"] + p["position"]
        x = scanned(x, p["layers"], remat=False, attention=lambda q, k, v: by_hand(q, k, v, False))
        return xent(x.mean(1) @ p["head"], b["y"])

    batch = {"x": rows(B, S, 12), "y": labels(VOCAB, B)}
    shapes: Any = {"patch": (12, WIDTH), "position": (S, WIDTH)}
    return *trained(model(**shapes), loss, batch, TX), {"x": TOKENS, "y": P("rows")}


def mlp() -> Step:
    """Of each token alone."""

    def loss(p, b):
        return jnp.mean((jnp.tanh(b["x"] @ p["a"]) @ p["b"] - b["y"]) ** 2)

    def params():
        return {"a": normal(0, 12, 32), "b": normal(1, 32, 12)}

    return *trained(params, loss, {"x": rows(B, S, 12), "y": rows(B, S, 12)}, TX), TOKENS


def images() -> Step:
    """Convolutions of images whose height is split: it is exchanged for another dim."""

    def loss(p, b):
        x = b["x"]
        for w in (p["first"], p["second"]):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(
                lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
            )
        return xent(x.mean((1, 2)) @ p["head"], b["y"])

    def params():
        shapes = {"first": (3, 3, 3, 8), "second": (3, 3, 8, 8), "head": (8, 10)}
        return {
            name: normal(i, *shape, scale=0.2) for i, (name, shape) in enumerate(shapes.items())
        }

    batch = {"x": rows(B, 8, 8, 3), "y": labels(10, B)}
    return *trained(params, loss, batch, TX), {"x": TOKENS, "y": P("rows")}


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


STEPS: dict[str, Callable[[], Step]] = {
    make.__name__: make
    for make in (
        gpt, gpt_that_shifts, gpt_without_the_last, llama, t5, vit, mlp, images, recurrent,
    )
}  # fmt: skip
TRANSFORMERS = "gpt", "gpt_that_shifts", "gpt_without_the_last", "llama", "t5", "vit"
