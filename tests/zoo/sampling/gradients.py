"""How a step takes gradients, and what it does with them.

Lines of the step. They are given `f(p, b, t) -> (loss, aux)` and leave `loss`, `aux` and `grads`.
"""

_PLAIN = "(loss, aux), grads = jax.value_and_grad(f, has_aux=True)(p, b, t)"
_AUX = "loss, aux = f(p, b, t)"
_ROW = "jax.tree.map(lambda x: x[None], {0}), jax.tree.map(lambda x: x[:, None], {1})"
_PARTS = [
    "parts = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), b)",
    "part = lambda q: jax.value_and_grad(lambda p: f(p, q, t)[0])(p)",
]
GRADIENTS: dict[str, tuple[list[str], int]] = {
    "plain": ([_PLAIN], 60),
    "vjp": (["loss, vjp, aux = jax.vjp(lambda p: f(p, b, t), p, has_aux=True)",
             "grads, = vjp(jnp.ones_like(loss))"], 5),
    "two steps": (["first = jax.grad(f, has_aux=True)(p, b, t)[0]",
                   "q = jax.tree.map(lambda w, g: w - 0.1 * g, p, first)",
                   "(loss, aux), grads = jax.value_and_grad(f, has_aux=True)(q, b, t)"], 4),
    "MAML": (["inner = lambda p: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(f, "
              "has_aux=True)(p, b, t)[0])",
              "(loss, aux), grads = jax.value_and_grad(lambda p: f(inner(p), b, t), has_aux=True)(p)"], 3),
    "SAM": (["first = clipped(jax.grad(f, has_aux=True)(p, b, t)[0], 0.05)",
             "q = jax.tree.map(jnp.add, p, first)",
             "(loss, aux), grads = jax.value_and_grad(f, has_aux=True)(q, b, t)"], 4),
    "curvature": (["only = lambda p: jax.grad(lambda p: f(p, b, t)[0])(p)", _AUX,
                   "grads, bent = jax.jvp(only, (p,), (p,))",
                   "grads = jax.tree.map(lambda g, h: g + 0.01 * h, grads, bent)"], 2),
    "line search": ([_PLAIN, "rate = line_search(lambda q: f(q, b, t), p, grads, loss)",
                     "grads = jax.tree.map(lambda g: rate * g, grads)"], 2),
    "skipped if high": ([_PLAIN, "grads = jax.tree.map(lambda g: jnp.where(loss > 0.5, g, 0.1 * g), "
                                 "grads)"], 3),
    "rate by loss": ([_PLAIN, "grads = lax.cond(loss > 1, lambda g: clipped(g, 0.5), lambda g: g, "
                              "grads)"], 3),
    "adversarial": ([  # two models: the first half of the parameters against the second
        "names = sorted(p)", "mine = {{k: p[k] for k in names[::2]}}",
        "theirs = {{k: p[k] for k in names[1::2]}}",
        "(loss, aux), one = jax.value_and_grad(lambda q: f({{**p, **q}}, b, t), has_aux=True)(mine)",
        "new = jax.tree.map(lambda w, g: w - 0.1 * g, mine, one)",
        "two = jax.grad(lambda q: -f({{**new, **q}}, b, t)[0])(theirs)",
        "grads = {{**one, **two}}"], 3),
    "noisy": ([_PLAIN, "grads = {{k: g + 1e-2 * random.normal(random.fold_in({key}, i), g.shape)",
               "         for i, (k, g) in enumerate(sorted(grads.items()))}}"], 2),
    "perturbed": ([_AUX,  # evolution strategies: no derivative at all
                   "noise = {{k: random.normal(random.fold_in({key}, i), (3, *w.shape)) for i, (k, "
                   "w) in enumerate(sorted(p.items()))}}",
                   "found = jax.vmap(lambda e: f(jax.tree.map(lambda w, d: w + 0.1 * d, p, e), b, "
                   "t)[0])(noise)",
                   "grads = jax.tree.map(lambda e: jnp.tensordot(found - found.mean(), e, 1), noise)"], 2),
}  # fmt: skip
# These cut the batch in two themselves: only if rows are even, and no data names rows or runs along dim 1.
HALVES: dict[str, tuple[list[str], int]] = {
    "scan": ([*_PARTS, _AUX, "zero = jax.tree.map(jnp.zeros_like, (loss, p))",
              "(loss, grads), _ = lax.scan(lambda c, q: (jax.tree.map(jnp.add, c, part(q)), None), "
              "zero, parts)"], 4),
    "unrolled": ([*_PARTS, _AUX, "halves = [part(jax.tree.map(lambda x: x[i], parts)) for i in range(2)]",
                  "loss, grads = jax.tree.map(lambda a, b: 0.5 * (a + b), *halves)"], 3),
    "tasks": ([*_PARTS, _AUX,  # MAML: each half is a task, which adapts for itself
               "adapted = lambda p, q: jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(lambda p: "
               "f(p, q, t)[0])(p))",
               "grads = jax.grad(lambda p: jax.vmap(lambda q: f(adapted(p, q), q, "
               "t)[0])(parts).mean())(p)"], 3),
    "two updates": ([*_PARTS, _AUX,
                     "moved = lax.scan(lambda w, q: (jax.tree.map(lambda w, g: w - 0.1 * g, w,",
                     "    jax.grad(lambda p: f(p, q, t)[0])(w)), None), p, parts)[0]",
                     "grads = jax.tree.map(jnp.subtract, p, moved)"], 2),
}  # fmt: skip
_ONE = "one = lambda r, u: jax.grad(lambda p: f(p, " + _ROW.format("r", "u") + ")[0])(p)"
_MOVED = "rows = (b, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), t))"
PER_EXAMPLE: dict[str, tuple[list[str], int]] = {
    "vmap, clipped": ([_AUX, _MOVED, _ONE,
                       "grads = jax.vmap(lambda x: clipped(one(*x), 0.5))(rows)",
                       "grads = jax.tree.map(lambda g: g.mean(0), grads)"], 3),
    "map, clipped": ([_AUX, _MOVED, _ONE,
                      "grads = lax.map(lambda x: clipped(one(*x), 0.5), rows)",
                      "grads = jax.tree.map(lambda g: g.mean(0), grads)"], 2),
    "scan, clipped": ([_AUX, _MOVED, _ONE,
                       "add = lambda c, x: (jax.tree.map(jnp.add, c, clipped(one(*x), 0.5)), None)",
                       "grads = lax.scan(add, jax.tree.map(jnp.zeros_like, p), rows)[0]"], 3),
    "variance": ([_PLAIN, _MOVED, _ONE, "each = jax.vmap(lambda x: one(*x))(rows)",
                  "grads = jax.tree.map(lambda g, e: g / (1 + jnp.var(e, 0)), grads, each)"], 2),
    "Fisher": ([_PLAIN, _MOVED, _ONE, "each = jax.vmap(lambda x: one(*x))(rows)",
                "grads = jax.tree.map(lambda g, e: g / (0.1 + jnp.mean(e ** 2, 0)), grads, each)"], 2),
    "row by row": ([_AUX, _MOVED, _ONE,  # an update for each row, in the order of the batch
                    "turn = lambda w, x: (jax.tree.map(lambda w, g: w - 0.02 * g, w, one(*x)), None)",
                    "grads = jax.tree.map(jnp.subtract, p, lax.scan(turn, p, rows)[0])"], 1),
}  # fmt: skip
AFTERWARDS: dict[str, tuple[str, int]] = {
    "as they are": ("", 8),
    "global norm": ("grads = clipped(grads, 0.3)", 2),
    "each norm": ("grads = jax.tree.map(lambda g: g / (0.1 + jnp.linalg.norm(g)), grads)", 1),
    "by rate": (
        "grads = jax.tree.map(lambda g: s['rate'] * g, grads)\n    s['rate'] = jnp.where(loss < "
        "s['rate'], 0.9, 0.7) * s['rate']", 1),
}  # fmt: skip
