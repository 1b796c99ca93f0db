"""What makes features `[B, n]` of features `[B, n]` by all rows of the batch together."""

COUPLINGS: dict[str, tuple[str, int]] = {
    "batch norm": ("norm({h}, 0) * {gain} + {vec}", 6),
    "masked norm": ("{h} - jnp.sum(jnp.where({mask}[:, None], {h}, 0), 0) / jnp.sum({mask})", 3),
    "statistics in layers": (
        "lax.scan(lambda a, layer: (norm(mlp(*layer)(a), 0), None), {h}, {layers})[0]", 3),
    "groups": ("jax.vmap(lambda g: norm(g, 0))({h}.reshape(2, -1, {n})).reshape({h}.shape)", 2),
    "softmax": ("jax.nn.softmax({h}, 0) * {B}", 2),
    "logsumexp": ("{h} - jax.nn.logsumexp({h}, 0)", 2),
    "maximum": ("{h} / (1 + jnp.max(jnp.abs({h}), 0))", 2),
    "sinkhorn": ("sinkhorn({h})", 2),
    "whitening": ("whiten({h})", 2),
    "covariance": ("{h} @ ({h}.T @ {h}) / {h}.shape[0]", 3),
    "attention": ("attend({h} @ {mat}, {h}, {h})", 4),
    "kernel": ("jnp.exp(-jnp.sum(({h}[:, None] - {h}[None]) ** 2, -1)) @ {h} / {B}", 3),
    "neighbours": ("{h}[lax.top_k(off_diagonal(unit({h}) @ unit({h}).T), 2)[1]].mean(1)", 2),
    "capacity": ("capacity({h}, {gates})", 2),
    "sort": ("jnp.sort({h}, 0)", 2),
    "sort by another": ("{h}[jnp.argsort({h}[:, 0])]", 3),
    "rank": ("{h} + 0.1 * jnp.argsort(jnp.argsort({h}[:, 0]))[:, None]", 2),
    "two sorted": (
        "(lambda a: a[1] + 0.1 * {h})(lax.sort((jnp.broadcast_to({h}[:, :1], {h}.shape), {h}), "
        "dimension=0, num_keys=1))", 1),
    "top": ("{h} - lax.top_k({h}[:, 0], min(3, {B}))[0].mean()", 2),
    "top rows": ("{h} - {h}[lax.top_k({h}.sum(-1), 2)[1]].mean(0)", 2),
    "median": ("{h} - jnp.median({h}, 0)", 2),
    "quantile": ("jnp.minimum({h}, jnp.quantile({h}, 0.8, axis=0))", 2),
    "cumsum": ("jnp.cumsum({h}, 0) / {B}", 3),
    "cumsum, reversed": ("lax.cumsum({h}, 0, reverse=True) / {B}", 1),
    "cummax": ("lax.cummax({h}, 0)", 2),
    "cumprod": ("jnp.cumprod(1 + 0.1 * jnp.tanh({h}), 0)", 1),
    "cumlogsumexp": ("lax.cumlogsumexp({h}, 0)", 1),
    "associative scan": ("associative({h})", 1),
    "running mean": ("running({h})", 3),
    "roll": ("{h} + 0.5 * jnp.roll({h}, 1, 0)", 4),
    "roll by step": ("{h} + 0.5 * jnp.roll({h}, s['step'], 0)", 1),
    "flip": ("{h} - 0.5 * {h}[::-1]", 3),
    "differences": ("{h} + jnp.concatenate([jnp.zeros_like({h}[:1]), jnp.diff({h}, axis=0)])", 2),
    "shifted": ("jnp.pad({h}, ((1, 0), (0, 0)))[:-1] * {vec} + {h}", 2),
    "halves swapped": ("jnp.concatenate([{h}[{B} // 2:], {h}[:{B} // 2]])", 3),
    "every second": ("{h} - {h}[::2].mean(0)", 3),
    "first rows": ("{h} - {h}[:3].mean(0)", 3),
    "last row": ("{h} * jax.nn.sigmoid({h}[-1])", 2),
    "row by step": ("{h} - 0.3 * lax.dynamic_index_in_dim({h}, s['step'] % 3, 0)", 2),
    "dynamic slice": ("{h} - lax.dynamic_slice_in_dim({h}, {flag}, 2).mean(0)", 2),
    "gather": ("{h}[{perm}]", 4),
    "take": ("jnp.take({h}, {perm}, 0, mode='clip') * {vec}", 1),
    "scatter": ("jnp.zeros_like({h}).at[{perm}].add({h} * {vec})", 2),
    "set rows": ("{h}.at[:2].set(0.5)", 2),
    "add to rows": ("{h}.at[{ids} % 3].add(0.3)", 2),
    "segments": ("{h} - (jax.ops.segment_sum({h}, {ids}, 8) / 4)[{ids}]", 3),
    "classes": ("{h} + (jax.nn.one_hot({ids}, 8).T @ {h} / {B})[{ids}]", 2),
    "best row": ("{h} - {h}[jnp.argmax({h}[:, 0])]", 2),
    "count": ("{h} * jnp.mean({h} > 0, 0)", 2),
    "any": ("jnp.where(jnp.any({h} > 1.5, 0), {h}, 0.9 * {h})", 1),
    "product": ("{h} * jnp.prod(1 + 0.1 * jnp.tanh({h}), 0)", 1),
    "convolution along": (
        "lax.conv_general_dilated({h}[None], {stencil}, (1,), 'SAME', dimension_numbers="
        "('NWC', 'WIO', 'NWC'))[0]", 1),
    "windows": ("lax.reduce_window({h}, 0.0, lax.add, (2, 1), (1, 1), 'SAME')", 1),
    "fourier": ("jnp.fft.fft({h}, axis=0).real / {B} + {h}", 1),
    "triangle": ("jnp.tril(jnp.ones(({B}, {B}))) @ {h} / {B}", 2),
    "branch on batch": ("lax.cond({h}.mean() > 0, mlp({mat}, {vec}), lambda a: 0.5 * a, {h})", 4),
    "switch on batch": (
        "lax.switch(jnp.argmax({h}.sum(0)) % 3, [mlp({mat}, {vec}), jnp.sin, lambda a: a - "
        "a.mean(0)], {h})", 3),
    "while on batch": (
        "{h} * lax.while_loop(lambda c: jnp.mean(({h} * c) ** 2) > 0.3, lambda c: 0.7 * c, 1.0)", 3),
    "loop on batch": ("lax.fori_loop(0, 2, lambda i, a: a - 0.5 * a.mean(0), {h})", 2),
    "fixed point": (
        "lax.scan(lambda m, _: (0.5 * m + 0.5 * jnp.tanh({h} + m).mean(0), m), jnp.zeros({n}), "
        "length=2)[0] + {h}", 2),
    "permutation": ("random.permutation({key}, {h})", 1),
    "shuffled order": ("{h}[random.permutation({key}, {B})]", 1),
    "drawn rows": ("{h} + 0.3 * {h}[random.randint({key}, ({B},), 0, {B})]", 1),
    "mixup": ("(lambda r: r * {h} + (1 - r) * {h}[::-1])(random.uniform({key}, ({B}, 1)))", 1),
    "drawn by weight": ("{h} - {h}[random.categorical({key}, {h}[:, 0])]", 1),
    "transposed": ("({h}.T @ jnp.tanh({h} @ {h}.T)).T / {B}", 2),
    "over pairs": ("jnp.einsum('an,bn,bm->am', {h}, {h}, {other}) / {B}", 2),
    "merged": ("norm({h}.reshape(-1), 0).reshape({h}.shape)", 2),
    "interleaved": ("jnp.stack([{h}, -{h} * {vec}], 1).reshape(-1, {n})[1::2] + {h}", 2),
    "repeated rows": ("jnp.repeat({h}, 2, 0)[::2] + jnp.repeat({h}, 2, 0)[:{B}]", 2),
    "tiled": ("jnp.tile({h}, (2, 1))[1:{B} + 1]", 2),
    "both ways": ("norm(jnp.concatenate([{h}, {h} * {vec}]), 0)[{B}:]", 2),
    "column major": ("{h} + 0.1 * jnp.cumsum({h}.T.reshape(-1)).reshape({n}, -1).T / {B}", 2),
    "flat sort": ("{h} - jnp.sort({h}.reshape(-1))[:3].mean()", 1),
    "along order": ("jnp.take_along_axis({h}, jnp.argsort({h}, 0), 0)", 2),
    "searched": ("{h} + 0.1 * jnp.searchsorted(jnp.sort({h}[:, 0]), {h}[:, 0])[:, None]", 1),
    "found": ("{h} - {h}[jnp.nonzero({h}[:, 0] > 0, size=2)[0]].mean(0)", 2),
    "convolved": ("{h} + jnp.convolve({h}[:, 0], jnp.ones(3) / 3, mode='same')[:{B}, None]", 1),
    "projected": ("{h} @ jnp.linalg.inv(jnp.eye({n}) + {h}.T @ {h} / {B})", 1),
    "diagonal": ("{h} * jnp.diagonal({h} @ {h}.T)[:, None] / {n}", 2),
    "correlation": ("{h} @ jnp.cov({h}.T).reshape({n}, {n})", 1),
    "loop over rows": (
        "{h} - lax.fori_loop(0, {B}, lambda i, c: 0.5 * c + 0.5 * {h}[i], jnp.zeros({n}))", 2),
    "scan of pairs": (
        "{h} + lax.scan(lambda c, x: (c + x[0] * x[1], None), jnp.zeros({n}), ({h}[:-1], "
        "{h}[1:]))[0] / {B}", 2),
    "scan, reversed": ("lax.scan(lambda c, x: ((c + x) / 2,) * 2, {h}[0], {h}, reverse=True)[1]", 2),
    "map of rows": ("lax.map(lambda x: jnp.tanh(x - {h}.mean(0)), {h})", 2),
    "map of some": ("lax.map(lambda x: x @ {mat}, {h}, batch_size=3)", 2),
    "over columns": ("jax.vmap(lambda c: c - jnp.max(c) * 0.3, in_axes=1, out_axes=1)({h})", 2),
    "pairs by vmap": ("jax.vmap(lambda a: jax.vmap(lambda b: jnp.tanh(a @ b))({h}))({h}) @ {h} / {B}", 2),
    "inverted": ("{h}[jnp.argsort({perm})]", 2),
    "windowed mean": ("{h} - jnp.stack([jnp.roll({h}, i, 0) for i in range(3)]).mean(0)", 2),
    "not a number": ("{h} - jnp.nanmean(jnp.where({mask}[:, None], {h}, jnp.nan), 0)", 2),
    "complex": ("jnp.abs(jnp.sum({h} * jnp.exp(1j * {h}), 0)) / {B} + {h}", 1),
    "padded rows": (
        "jnp.pad({h}, ((1, 2), (0, 0)), mode='reflect')[1:-2] + jnp.pad({h}, ((2, 1), (0, "
        "0)))[:-3]", 1),
    "strided": ("{h}.at[::2].multiply(0.5)", 2),
    "swapped": ("{h}.at[jnp.array([0, 2])].set({h}[jnp.array([2, 0])])", 2),
    "min over max": ("{h} * (jnp.min({h}, 0) / (1 + jnp.max({h} ** 2, 0)))", 1),
    "clusters": (
        "lax.fori_loop(0, 2, lambda i, c: (lambda a: (a.T @ {h}) / (0.5 + a.sum(0)[:, None]))("
        "jax.nn.softmax({h} @ c.T)), {codes})[jnp.argmax({h}, 1) % 5] + {h}", 1),
    "time and batch": ("{h} + norm({seq}, (0, 1)).mean(0) * {vec}", 2),
    "time merged": (
        "(lambda t: {h} + norm(t.reshape(-1, {n}) @ {mat}, 0).reshape(t.shape).mean(0))({seq})", 1),
}  # fmt: skip
EVEN_ROWS = {"groups"}
# What else needs rows of several microbatches at once, or more than sums over them: names in other tables.
ROWS_AT_ONCE = {
    *("memory bank", "against a bank", "pairs", "variance", "any", "range", "order", "top", "median"),
    *("first", "last", "best", "worst", "recall", "running", "transposed", "Fisher", "row by row"),
    *("map, clipped", "scan, clipped", "line search", "perturbed", "skipped if high", "rate by loss"),
    *("while per row", "branch per row", "where", "singular values", "runs", "sorted", "halves", "unique"),
    *("covariance", "centers", "most", "flags", "first rows", "last row",
        "mean of rows "
        "drawn", "last best"),
}  # fmt: skip
