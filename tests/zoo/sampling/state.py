"""What a step remembers beside parameters and optimizer state: how it starts, and how it is renewed.

In a renewal `h` is the last features `[B, n]` (without gradient), `loss` the loss.
"""

# (initial value as NumPy of {n} features, renewal, weight)
EXTRAS: dict[str, tuple[str, str, int]] = {
    "ema": ("{{k: v + 0.0 for k, v in p.items()}}", "optax.incremental_update(p, {s}, 0.1)", 4),
    "mean": ("np.zeros({n})", "0.9 * {s} + 0.1 * h.mean(0)", 4),
    "variance": ("np.ones({n})", "0.9 * {s} + 0.1 * h.var(0, ddof=1)", 2),
    "covariance": ("np.eye({n})", "0.9 * {s} + 0.1 * h.T @ h / h.shape[0]", 2),
    "rows seen": ("np.int32(0)", "{s} + h.shape[0]", 3),
    "tokens seen": ("np.int32(0)", "{s} + jnp.sum(h > 0, dtype=jnp.int32)", 2),
    "usage": ("np.zeros({n}, np.int32)", "{s} + jnp.bincount(jnp.argmax(h, -1), "
                                         "length={n}).astype(jnp.int32)", 3),
    "histogram": ("np.zeros(4, np.int32)", "{s}.at[jnp.clip(h[:, 0] + 2, 0, 3).astype(int)].add(1)", 3),
    "last best": ("np.int32(0)", "jnp.where(loss < 1, jnp.argmax(h[:, 0]).astype(jnp.int32), {s})", 2),
    "most": ("np.full({n}, -9.0)", "jnp.maximum({s}, h.max(0))", 2),
    "history": ("np.zeros(4)", "{s}.at[s['step'] % 4].set(loss)", 2),
    "lowest": ("np.asarray(9.0)", "jnp.minimum({s}, loss)", 2),
    "high losses": ("np.int32(0)", "lax.cond(loss > 1, lambda c: c + 1, lambda c: 0 * c, {s})", 2),
    "centers": ("np.zeros((3, {n}))", "{s} + 0.1 * jax.ops.segment_sum(h, jnp.argmax(h, -1) % 3, 3)", 2),
    "last row": ("np.zeros({n})", "h[-1]", 1),
    "first rows": ("np.zeros((2, {n}))", "h[:2]", 1),
    "flags": ("np.zeros({n}, bool)", "{s} | jnp.any(h > 1, 0)", 1),
    "bits": ("np.zeros({n}, np.uint32)", "{s} ^ jnp.sum(h > 0, 0, dtype=jnp.uint32)", 1),
    "mean of rows drawn": ("np.zeros({n})", "h[random.randint({key}, (3,), 0, h.shape[0])].mean(0)", 1),
    "grad norm": ("np.asarray(0.0)", "0.5 * {s} + optax.tree.norm(grads)", 2),
}  # fmt: skip
