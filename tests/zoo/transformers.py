"""Language models: layers in a scan or one after the other, and every form of attention."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._parts import adamw, cross_entropies, kernel, learning, normal, start
from ._program import Program, program, register

VOCAB = 24
LENGTH = 6
WIDTH = 16
HEADS = 4
HEAD = 4
ROWS = 16  # as many as the width
TX = adamw()
FLOAT32_INSIDE: dict[str, Any] = {
    "exact_dtypes": ("float32",),
    "note": "jax.nn takes the softmax in float32, whatever it is given",
}


def _tokens(num_steps, dtype):
    rng = np.random.default_rng(1)
    shape = (ROWS, LENGTH + 1)
    return [(rng.integers(0, VOCAB, shape).astype(np.int32),) for _ in range(num_steps)]


def _layer_params(dtype, seed, kv_heads=HEADS):
    return {
        "scale": 1 + normal(seed, (2, WIDTH), dtype, 0.1),
        "q": kernel(seed + 1, (WIDTH, HEADS * HEAD), dtype),
        "kv": kernel(seed + 2, (WIDTH, 2 * kv_heads * HEAD), dtype),
        "out": kernel(seed + 3, (HEADS * HEAD, WIDTH), dtype),
        "up": kernel(seed + 4, (WIDTH, 2 * WIDTH), dtype),
        "down": kernel(seed + 5, (2 * WIDTH, WIDTH), dtype),
    }


def _params(dtype, num_layers, kv_heads=HEADS):
    layers = [_layer_params(dtype, 10 * i, kv_heads) for i in range(num_layers)]
    return {
        "embed": normal(90, (VOCAB, WIDTH), dtype, 0.5),
        "position": normal(91, (LENGTH, WIDTH), dtype, 0.1),
        "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers),
    }


def _norm(x, scale):
    x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * jnp.broadcast_to(scale, x.shape)


def _heads(x, params, kv_heads=HEADS):
    b, t, _ = x.shape
    q = (x @ params["q"]).reshape(b, t, HEADS, HEAD)
    k, v = jnp.split((x @ params["kv"]).reshape(b, t, 2 * kv_heads, HEAD), 2, axis=2)
    return q, k, v


def _attention(q, k, v):
    """By hand: scores, a causal mask, softmax."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(causal[None, None], scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _rotated(x):
    half = x.shape[-1] // 2
    rates = 10.0 ** -jnp.arange(half, dtype=x.dtype)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * rates[None]
    cos, sin = (f(angles)[None, :, None] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _layer(x, params, attend=_attention, kv_heads=HEADS):
    q, k, v = _heads(_norm(x, params["scale"][0]), params, kv_heads)
    x = x + attend(q, k, v).reshape(*x.shape[:2], -1) @ params["out"]
    h = jax.nn.silu(_norm(x, params["scale"][1]) @ params["up"])
    return x + h @ params["down"]


def _embedded(params, tokens):
    x = params["embed"][tokens[:, :-1]]
    return x + jnp.broadcast_to(params["position"], x.shape)


def _loss(params, x, tokens):
    logits = x @ params["embed"].T
    losses = cross_entropies(logits, tokens[:, 1:])
    correct = (logits.argmax(-1) == tokens[:, 1:]).sum()
    return losses.mean(), {"losses": losses.mean(-1), "correct": correct}


def _scanned(layer=_layer, policy=None, remat=True):
    body = jax.checkpoint(layer, policy=policy) if remat else layer

    def forward(params, tokens):
        x = _embedded(params, tokens)
        x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, params["layers"])
        return x

    return forward


def _unrolled(layer=_layer, remat=False):
    body = jax.checkpoint(layer) if remat else layer

    def forward(params, tokens):
        x = _embedded(params, tokens)
        for i in range(params["layers"]["q"].shape[0]):
            x = body(x, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))
        return x

    return forward


def _language_model(make_forward, num_layers=2, kv_heads=HEADS, **more):
    forward = make_forward()

    def init(dtype):
        return start(_params(dtype, num_layers, kv_heads), TX)

    def loss(params, tokens):
        return _loss(params, forward(params, tokens), tokens)

    return Program(init=init, batches=_tokens, step=learning(loss, TX), covers="I2", **more)


def _with(attend, kv_heads=HEADS):
    return functools.partial(_layer, attend=attend, kv_heads=kv_heads)


def _rope(q, k, v):
    return _attention(_rotated(q), _rotated(k), v)


def _grouped_queries(q, k, v):
    """Two heads of keys for four of queries, by a reshape of the queries' heads."""
    b, t, _, _ = q.shape
    grouped = q.reshape(b, t, k.shape[2], -1, HEAD)
    scores = jnp.einsum("bqghd,bkgd->bghqk", grouped, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones((t, t), bool))
    shares = jax.nn.softmax(jnp.where(causal[None, None, None], scores, -1e9))
    return jnp.einsum("bghqk,bkgd->bqghd", shares, v).reshape(q.shape)


def _repeated_keys(q, k, v):
    return _attention(q, *(jnp.repeat(x, HEADS // x.shape[2], axis=2) for x in (k, v)))


def _sliding_window(q, k, v):
    t = q.shape[1]
    gap = jnp.arange(t)[:, None] - jnp.arange(t)[None]
    seen = (gap >= 0) & (gap < 3)
    bias = jnp.where(seen, 0.0, -1e9).astype(q.dtype)
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1, dtype=q.dtype)
    alibi = -slopes[:, None, None] * jnp.abs(gap)[None].astype(q.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) + (bias[None] + alibi)[None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def _chunked_windows(q, k, v):
    """Blocks of three positions see themselves and the block before: reshapes and rolls."""

    def blocks(x):
        return x.reshape(x.shape[0], -1, 3, *x.shape[2:])

    q, k, v = blocks(q), blocks(k), blocks(v)
    k, v = (jnp.concatenate([jnp.roll(x, 1, axis=1), x], axis=2) for x in (k, v))
    scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k)
    at = jnp.arange(q.shape[1])
    seen = jnp.arange(6)[None] <= jnp.arange(3)[:, None] + 3
    seen = seen[None] & ((at[:, None, None] > 0) | (jnp.arange(6) >= 3)[None, None])
    shares = jax.nn.softmax(jnp.where(seen[None, :, None], scores, -1e9))
    out = jnp.einsum("bnhqk,bnkhd->bnqhd", shares, v)
    return out.reshape(out.shape[0], -1, *out.shape[3:])


def _streaming(q, k, v):
    """Online softmax: a scan over blocks of keys with running maxima and sums, as FlashAttention."""
    q = q / HEAD**0.5
    t = q.shape[1]

    def blocks(x):
        return x.reshape(x.shape[0], -1, 2, *x.shape[2:]).swapaxes(0, 1)

    def body(carry, block):
        out, total, largest = carry
        k, v, at = block
        scores = jnp.einsum("bqhd,bkhd->bqhk", q, k)
        seen = jnp.arange(t)[:, None] >= at[None]
        scores = jnp.where(seen[None, :, None], scores, -1e9)
        new = jnp.maximum(largest, scores.max(-1))
        shares = jnp.exp(scores - new[..., None])
        shrink = jnp.exp(largest - new)
        out = out * shrink[..., None] + jnp.einsum("bqhk,bkhd->bqhd", shares, v)
        return (out, total * shrink + shares.sum(-1), new), None

    rows = q[..., 0]
    first = jnp.zeros_like(q), jnp.zeros_like(rows), jnp.full_like(rows, -1e9)
    places = jnp.arange(t).reshape(-1, 2)
    (out, total, _), _ = jax.lax.scan(jax.checkpoint(body), first, (blocks(k), blocks(v), places))
    return out / total[..., None]


def _linear(q, k, v):
    """Linear attention: cumulative sums over positions."""
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    states = jnp.cumsum(jnp.einsum("bkhd,bkhe->bkhde", k, v), axis=1)
    sizes = jnp.cumsum(k, axis=1)
    return jnp.einsum("bqhd,bqhde->bqhe", q, states) / (q * sizes).sum(-1, keepdims=True)


def _jax_nn(**options):
    def attend(q, k, v):
        given = {name: value(q) if callable(value) else value for name, value in options.items()}
        return jax.nn.dot_product_attention(q, k, v, **given)

    return attend


def _lengths(q):
    return jnp.arange(q.shape[0], dtype=jnp.int32) % LENGTH + 1


_FORWARDS = [
    ("transformer_scanned", _scanned, HEADS),
    ("transformer_scanned_without_remat", lambda: _scanned(remat=False), HEADS),
    (
        "transformer_scanned_saving_products",
        lambda: _scanned(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
        HEADS,
    ),
    ("transformer_unrolled", _unrolled, HEADS),
    ("transformer_unrolled_with_remat", lambda: _unrolled(remat=True), HEADS),
    ("rope", lambda: _scanned(_with(_rope)), HEADS),
    ("grouped_queries", lambda: _scanned(_with(_grouped_queries, 2)), 2),
    ("grouped_queries_repeated", lambda: _scanned(_with(_repeated_keys, 2)), 2),
    ("sliding_window_and_alibi", lambda: _scanned(_with(_sliding_window)), HEADS),
    ("chunked_windows", lambda: _scanned(_with(_chunked_windows)), HEADS),
    ("streaming_attention", lambda: _scanned(_with(_streaming)), HEADS),
    ("linear_attention", lambda: _scanned(_with(_linear)), HEADS),
    ("jax_nn_attention", lambda: _scanned(_with(_jax_nn(is_causal=True))), HEADS),
    (
        "jax_nn_attention_grouped",
        lambda: _scanned(_with(_jax_nn(is_causal=True, scale=0.3), 2)),
        2,
    ),
    (
        "jax_nn_attention_local_window",
        lambda: _scanned(_with(_jax_nn(is_causal=True, local_window_size=(2, 0)))),
        HEADS,
    ),
    (
        "jax_nn_attention_lengths",
        lambda: _scanned(_with(_jax_nn(key_value_seq_lengths=_lengths))),
        HEADS,
    ),
    (
        "jax_nn_attention_bias_and_mask",
        lambda: _scanned(
            _with(
                _jax_nn(
                    bias=lambda q: jnp.linspace(0, 1, LENGTH, dtype=q.dtype)[None, None, None],
                    mask=lambda q: (
                        (q[:, :, 0, 0] > -1.0)[:, None, :, None]
                        | jnp.eye(LENGTH, dtype=bool)[None, None]
                    ),
                )
            )
        ),
        HEADS,
    ),
]
# In every run: what most models use, and one of each kind of mask.
_FREQUENT = {
    "transformer_scanned",
    "transformer_unrolled",
    "rope",
    "grouped_queries",
    "sliding_window_and_alibi",
    "jax_nn_attention",
    "jax_nn_attention_bias_and_mask",
}
for _name, _make_forward, _kv_heads in _FORWARDS:
    _more = FLOAT32_INSIDE if _name.startswith("jax_nn") else {}
    _build = functools.partial(_language_model, _make_forward, kv_heads=_kv_heads, **_more)
    register(_name, _build, is_slow=_name not in _FREQUENT)


@program
def tied_loss_in_chunks_of_tokens():
    """[rows, time] is merged, cut into chunks and scanned, so that no whole logits exist."""

    def init(dtype):
        return start(_params(dtype, 1), TX)

    def loss(params, tokens):
        x = _unrolled()(params, tokens).reshape(-1, WIDTH)
        labels = tokens[:, 1:].reshape(-1)

        @jax.checkpoint
        def body(total, chunk):
            losses = cross_entropies(chunk[0] @ params["embed"].T, chunk[1])
            return total + losses.sum(), losses

        chunks = x.reshape(4, -1, WIDTH), labels.reshape(4, -1)
        total, losses = jax.lax.scan(body, jnp.zeros((), x.dtype), chunks)
        return total / labels.size, {"losses": losses.reshape(tokens.shape[0], -1)}

    return Program(init=init, batches=_tokens, step=learning(loss, TX), covers="I2")
