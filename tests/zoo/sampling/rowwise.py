"""What makes features `[B, m]` of features `[B, n]`, row by row: layers of networks.

A template's result has as many features as its operand, unless it says `{m}`: then it has m.
"""

LAYERS: dict[str, tuple[str, int]] = {
    "dense": ("{h} @ {rect}", 14),
    "mlp": ("mlp({mat}, {vec})({h})", 8),
    "heads": ("jnp.einsum('bn,nkd->bkd', {h}, {heads}).sum(1)", 4),
    "multi-head attention": (
        "(lambda a: attend(a, a[:, :, ::-1], a).mean(1))(jnp.einsum('bn,nkd->bkd', {h}, {heads}))", 4),
    "affine": ("{h} * {gain} + {vec}", 4),
    "temperature": ("{h} / {scalar}", 2),
    "tanh": ("jnp.tanh({h})", 3),
    "relu": ("jax.nn.relu({h})", 2),
    "gelu": ("jax.nn.gelu({h})", 2),
    "softmax": ("jax.nn.softmax({h})", 2),
    "exp": ("jnp.exp(-jnp.square({h}))", 1),
    "layer_norm": ("norm({h}) * {gain}", 4),
    "slice": ("jnp.concatenate([{h}[:, 1:], {h}[:, :1]], -1)", 2),
    "widen": ("jnp.concatenate([{h}, {h} @ {mat}], -1).reshape(-1, 2, {n}).sum(1)", 2),
    "transpose": ("({mat} @ {h}.T).T", 2),
    "reduce": ("{h} - jnp.max({h}, -1, keepdims=True)", 2),
    "outer": ("jnp.einsum('bn,bm->bnm', {h}, {other}).mean(2)", 2),
    "cumsum": ("0.5 * jnp.cumsum({h}, -1)", 2),
    "sort": ("jnp.sort({h}, -1)", 1),
    "gate": ("{h} * jax.nn.sigmoid({other})", 3),
    "residual": ("0.7 * ({h} + {other})", 3),
    "where": ("jnp.where({h} > 0, {h} * {vec}, {h})", 3),
    "convolution": (
        "lax.conv_general_dilated({h}[:, :, None], {kernel}, (1,), 'SAME', dimension_numbers="
        "('NWC', 'WIO', 'NWC')).mean(2)", 3),
    "embedding": ("{h} + {table}[{ids}]", 6),
    "one-hot": ("{h} + jax.nn.one_hot({ids}, 8) @ {table}", 2),
    "layers": ("scan_layers({h}, {layers}, '{remat}')", 8),
    "layers, reversed": ("scan_layers({h}, {layers}, '{remat}', reverse=True)", 2),
    "layers, unrolled": ("scan_layers({h}, {layers}, '{remat}', unroll=2)", 1),
    "time": ("over_time({h}, {seq}, {mat}, {vec})", 5),
    "time and layers": ("over_time({h}, {seq}, {mat}, {vec}, {layers})", 3),
    "time, reduced": ("{h} + jnp.einsum('tbn,tbm->bm', {seq}, {seq}) @ {mat}", 2),
    "time, transposed": ("{h} + {seq}.swapaxes(0, 1).reshape({B}, -1)[:, :{n}] * {vec}", 2),
    "repeated": ("lax.fori_loop(0, 2, lambda i, a: mlp({mat}, {vec})(a), {h})", 3),
    "zero carry": (
        "lax.scan(lambda c, _: (mlp({mat}, {vec})(c + {h}), None), jnp.zeros_like({h}), length=2)[0]", 2),
    "branch on step": ("lax.cond(s['step'] % 2 == 0, mlp({mat}, {vec}), mlp({mat}, {vec}), {h})", 3),
    "branch on flag": ("lax.switch({flag}, [mlp({mat}, {vec}), jnp.zeros_like, lambda a: a], {h})", 3),
    "branch per row": (
        "per_row(lambda r: lax.cond(r.sum() > 0, mlp({mat}, {vec}), lambda r: 0.5 * r, r), {h}, "
        "'{loop}')", 4),
    "while per row": ("{h} + jax.vmap(halve)({h})", 2),
    "while on parameters": ("{h} * (1 + halve({vec}))", 2),
    "jit": ("jax.jit(mlp({mat}, {vec}))({h})", 2),
    "checkpoint": ("jax.checkpoint(lambda w, b, a: mlp(w, b)(a))({mat}, {vec}, {h})", 3),
    "vmap": ("jax.vmap(mlp({mat}, {vec}))({h})", 2),
    "custom_jvp": ("custom_square({h})", 1),
    "custom_vjp": ("with_custom_vjp(lambda w, b, a: mlp(w, b)(a))({mat}, {vec}, {h})", 2),
    "input gradient": ("jax.vmap(jax.grad(lambda r: mlp({mat}, {vec})(r).sum()))({h})", 3),
    "jacobian": ("jax.vmap(jax.jacfwd(mlp({mat}, {vec})))({h}).mean(2)", 2),
    "buffer": ("{h}[:, {buffer}]", 2),
    "experts": ("experts({h}, {gates}, {experts})", 2),
    "codebook": (
        "{h} + jax.lax.stop_gradient({codes}[jnp.argmin(jnp.sum(({h}[:, None] - {codes}) ** 2, "
        "-1), -1)])", 2),
    "float32": ("through({h}, 'float32')", 1),
    "dropout": ("jnp.where(random.bernoulli({key}, 0.7, {h}.shape), {h} / 0.7, 0)", 3),
    "noise": ("{h} + 0.1 * random.normal({key}, {h}.shape)", 2),
    "noise per row": ("{h} + jax.vmap(lambda k: random.uniform(k, ({n},)))(random.split({key}, {B}))", 1),
    "noise in layers": (
        "lax.scan(lambda a, k: (a * random.bernoulli(k, 0.8, a.shape), None), {h}, "
        "random.split({key}, 2))[0]", 1),
    "dropped features": ("{h} * random.bernoulli({key}, 0.7, ({n},))", 1),
    "memory bank": ("attend({h}, {queue}, {queue})", 3),
}  # fmt: skip
