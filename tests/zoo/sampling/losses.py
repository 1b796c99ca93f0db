"""Numbers and outputs of the last features `[B, n]`."""

# Means over rows that know nothing of each other: what gradients of one example can be of.
ROW_LOSSES: dict[str, tuple[str, int]] = {
    "squares": ("jnp.mean(({h} - {y}) ** 2)", 6),
    "huber": ("optax.huber_loss({h}, {y}).mean()", 3),
    "cross entropy": ("xent({h}, {labels}).mean()", 6),
    "smoothed": (
        "optax.softmax_cross_entropy({h}, optax.smooth_labels(jax.nn.one_hot({labels}, {n}), "
        "0.1)).mean()", 2),
    "logistic": ("optax.sigmoid_binary_cross_entropy({h}, {y} > 0).mean()", 2),
    "gradient penalty": (
        "jnp.mean(jax.vmap(jax.grad(lambda r: jnp.tanh(r @ {mat}).sum()))({h}) ** 2) + "
        "jnp.mean({h} * {y})", 1),
}  # fmt: skip
LOSSES: dict[str, tuple[str, int]] = {
    "sum": ("0.1 * jnp.sum(({h} - {y}) ** 2)", 4),
    "over a count": ("jnp.sum(({h} - {y}) ** 2) / {B}", 3),
    "over a size": ("jnp.sum(({h} - {y}) ** 2) / {h}.size", 2),
    "masked": ("jnp.sum(jnp.where({mask}, jnp.sum({h} ** 2, -1), 0)) / jnp.maximum(jnp.sum({mask}), 1)", 4),
    "masked mean": ("jnp.mean(({h} - {y}) ** 2, where={mask}[:, None])", 2),
    "weighted": ("(lambda w: jnp.sum(w[:, None] * ({h} - {y}) ** 2) / w.sum())({weights})", 4),
    "average": ("jnp.average(jnp.mean({h} ** 2, -1), weights={weights})", 2),
    "root": ("jnp.sqrt(jnp.mean(({h} - {y}) ** 2) + 0.01)", 4),
    "norm": ("jnp.linalg.norm({h} - {y}) / {B}", 2),
    "log of a mean": ("jnp.log(jnp.mean(jnp.exp(0.3 * {h})) + 0.1)", 3),
    "logsumexp": ("jax.nn.logsumexp({h} - {y})", 2),
    "hardest": ("jnp.max(jnp.mean(({h} - {y}) ** 2, -1))", 2),
    "hardest few": ("lax.top_k(jnp.mean(({h} - {y}) ** 2, -1), min(3, {B}))[0].mean()", 3),
    "median": ("jnp.median(jnp.mean(({h} - {y}) ** 2, -1))", 2),
    "quantile": ("jnp.quantile(jnp.mean(({h} - {y}) ** 2, -1), 0.7)", 2),
    "tail": ("jnp.sort(jnp.mean(({h} - {y}) ** 2, -1))[-2:].mean()", 2),
    "spread": ("jnp.var({h}) + jnp.mean(({h} - {y}) ** 2)", 2),
    "robust": ("(lambda e: jnp.sum(jax.nn.softmax(3 * e) * e))(jnp.mean(({h} - {y}) ** 2, -1))", 3),
    "balanced": (
        "(lambda l: jnp.mean(xent({h}, l) / (0.5 + jnp.bincount(l, length={n})[l])))({labels})", 2),
    "entropy of the mean": (
        "(lambda q: jnp.sum(q * jnp.log(q + 1e-3)))(jax.nn.softmax({h}).mean(0)) + 0.1 * "
        "jnp.mean({h} ** 2)", 3),
    "balance": (
        "jnp.sum(jax.nn.softmax({h}).mean(0) * jax.nn.one_hot(jnp.argmax({h}, -1), {n}).mean(0))", 2),
    "contrastive": ("info_nce({h}, {h} @ {mat})", 5),
    "one-sided": ("info_nce({h}, {h} @ {mat}, symmetric=False)", 3),
    "SimCLR": ("sim_clr({h}, {h} @ {mat})", 3),
    "sigmoid pairs": (
        "(lambda z: jnp.mean(jax.nn.softplus(-z * (2 * jnp.eye(z.shape[0]) - 1))))({h} @ ({h} @ "
        "{mat}).T)", 3),
    "own negatives": ("jnp.mean(jax.nn.softplus(jnp.sum({h} * (jnp.roll({h}, 1, 0) - {y}), -1)))", 3),
    "redundancy": ("vic({h}, {h} @ {mat})", 2),
    "triplet": ("triplet({h}, {ids})", 2),
    "ranking": (
        "jnp.mean(jax.nn.relu(1 - ({h}[:, None, 0] - {h}[None, :, 0]) * jnp.sign({weights}[:, "
        "None] - {weights}[None])))", 2),
    "against a bank": ("xent({h} @ {queue}.T, {ids} % 6).mean()", 3),
    "branch": (
        "(lambda e: lax.cond(e > 1, lambda e: jnp.sqrt(e), lambda e: e, e))(jnp.mean(({h} - {y}) "
        "** 2))", 3),
    "first row": ("jnp.mean({h}[0] ** 2) + 0.1 * jnp.mean(({h} - {y}) ** 2)", 2),
    "chunks": (
        "(lambda e: jnp.mean(lax.map(lambda c: jnp.mean(c) ** 2, e[:{B} // 2 * 2].reshape(-1, 2, {n}))))"
        "({h} - {y}) + jnp.mean({h} ** 2)", 1),
    "discounted": (
        "lax.scan(lambda c, r: (0.9 * c + r, c), 0.0, jnp.mean(({h} - {y}) ** 2, -1), "
        "reverse=True)[1].mean()", 2),
    "likelihood ratio": (
        "(lambda r, a: -jnp.mean(jnp.minimum(r * a, jnp.clip(r, 0.8, 1.2) * a)))(jnp.exp(0.3 * "
        "{h}[:, 0]), norm({weights}))", 2),
    "drawn targets": ("jnp.mean(({h} - random.normal({key}, {h}.shape)) ** 2)", 1),
}  # fmt: skip
EXTRA_TERMS: dict[str, tuple[str, int]] = {
    "none": ("0.0", 12),
    "decay": ("0.01 * optax.tree.norm(p, squared=True)", 2),
    "rate": ("{rate} * jnp.mean({h} ** 2)", 2),
    "variance": ("0.1 * jax.nn.relu(1 - jnp.std({h}, 0)).sum()", 2),
    "pairs": ("0.1 * jnp.mean(jnp.tanh({h} @ {h}.T))", 2),
}
METRICS: dict[str, tuple[str, int]] = {
    "rows": ("{h}", 3),
    "predictions": ("jnp.argmax({h}, -1)", 3),
    "right": ("jnp.sum(jnp.argmax({h}, -1) == {labels})", 3),
    "mean": ("{h}.mean(0)", 3),
    "count": ("jnp.int32({B})", 2),
    "positive": ("jnp.sum({h} > 0, 0)", 2),
    "best": ("jnp.argmax({h}, 0)", 2),
    "worst": ("jnp.argmin({h}[:, 0])", 2),
    "order": ("jnp.argsort({h}[:, 0])", 2),
    "top": ("lax.top_k({h}[:, 0], min(3, {B}))", 2),
    "histogram": ("jnp.histogram({h}, bins=4, range=(-2, 2))[0]", 2),
    "counts": ("jnp.bincount({ids}, length=8)", 2),
    "median": ("jnp.median({h})", 2),
    "range": ("(jnp.min({h}), jnp.max({h}))", 2),
    "any": ("jnp.any({h} > 2) | jnp.all({h} > -2, 0)", 2),
    "first": ("{h}[:2]", 2),
    "last": ("{h}[-1]", 2),
    "pairs": ("{h} @ {h}.T", 2),
    "bits": ("random.bits({key}, ({B}, 2))", 1),
    "key": ("random.key_data({key})", 1),
    "noise": ("random.normal({key}, (3,))", 1),
    "drawn": ("random.randint({key}, ({B},), 0, 9)", 1),
    "transposed": ("{h}.T", 2),
    "flags": ("{h}[:, 0] > 0", 2),
    "narrow": ("{h}.astype(jnp.float16)", 1),
    "recall": ("jnp.mean(jnp.argmax({h} @ {h}.T, -1) == jnp.arange({B}))", 2),
    "where": ("(jnp.argmax({h}), jnp.argmin({h}.T))", 2),
    "unique": ("jnp.unique({ids}, size=4, fill_value=-1, return_counts=True)", 1),
    "whole numbers": (
        "(lambda i: (i.T @ i, jnp.cumsum(i, 0)[-1], jnp.bitwise_xor.reduce(i, 0)))(jnp.round({h} * "
        "4).astype(int))",
        1,
    ),
    "sorted": ("jnp.sort({h}.reshape(-1))[-4:]", 1),
    "merged": ("{h}.reshape(-1)", 1),
    "halves": ("jnp.array_split({h}, 2)", 1),
    "singular values": ("jnp.linalg.svd({h}, compute_uv=False)", 1),
    "runs": ("jnp.sum({labels}[1:] != {labels}[:-1])", 1),
    "running": ("jnp.cumsum({h}[:, 0])", 1),
}
