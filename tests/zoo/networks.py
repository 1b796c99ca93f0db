"""Convolutions, recurrences, mixtures, generative models, graphs: what models are made of."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.sparse import BCOO

from ._parts import (
    CLASSES,
    FEATURES,
    ROWS,
    SGD,
    WIDTH,
    adamw,
    classified,
    cross_entropies,
    dense,
    dense_params,
    kernel,
    labelled,
    learn,
    learning,
    mlp,
    mlp_of,
    mlp_params,
    mlp_start,
    normal,
    normals,
    start,
    with_arguments,
)
from ._program import Program, program, relative

CHANNELS = 8
IMAGE = (16, 6, 6, 3)  # rows, height, width, channels


def _images(num_steps, dtype):
    rng = np.random.default_rng(3)
    return [
        (
            rng.normal(size=IMAGE).astype(dtype),
            rng.integers(0, CLASSES, IMAGE[0]).astype(np.int32),
        )
        for _ in range(num_steps)
    ]


def _conv(x, w, **options):
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, dimension_numbers=dims, **options)


def _batch_norm(x, scale, running):
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    x = (x - mean[None, None, None]) * jax.lax.rsqrt(variance + 1e-3)[None, None, None]
    new = {"mean": mean, "var": variance}
    running = jax.tree.map(lambda old, now: 0.8 * old + 0.2 * now, running, new)
    return x * scale[None, None, None], jax.lax.stop_gradient(running)


@program
def resnet_with_batch_norm():
    """Two residual blocks, strides, max pooling; the norms are over the whole batch, as jit's are."""

    def init(dtype):
        params = {
            "stem": kernel(0, (3, 3, 3, CHANNELS), dtype),
            "blocks": [
                {
                    "first": kernel(10 * i + 1, (3, 3, CHANNELS, CHANNELS), dtype),
                    "second": kernel(10 * i + 2, (3, 3, CHANNELS, CHANNELS), dtype),
                    "scales": 1 + normal(10 * i + 3, (2, CHANNELS), dtype, 0.1),
                }
                for i in range(2)
            ],
            "head": dense_params(50, CHANNELS, CLASSES, dtype),
        }
        zeros, ones = jnp.zeros(CHANNELS, dtype), jnp.ones(CHANNELS, dtype)
        running = [[{"mean": zeros, "var": ones} for _ in range(2)] for _ in range(2)]
        return start(params, running=running)

    def step(state, image, label):
        def loss_fn(params):
            x, running = _conv(image, params["stem"]), []
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
            for block, old in zip(params["blocks"], state["running"], strict=True):
                h, first = _batch_norm(_conv(x, block["first"]), block["scales"][0], old[0])
                h = _conv(jax.nn.relu(h), block["second"])
                h, second = _batch_norm(h, block["scales"][1], old[1])
                x = jax.nn.relu(x + h)
                running.append([first, second])
            logits = dense(params["head"], x.mean((1, 2)))
            losses = cross_entropies(logits, label)
            return losses.mean(), {"losses": losses, "running": running}

        state, outputs = learn(state, loss_fn)
        running = outputs.pop("running")
        return {**state, "running": running}, outputs

    return Program(init=init, batches=_images, step=step, covers="I2 I4")


@program
def convolutions_of_every_kind():
    """Depthwise, grouped, dilated, strided and transposed ones, in one and two dims."""

    def init(dtype):
        params = {
            "stem": kernel(0, (1, 1, 3, CHANNELS), dtype),
            "depthwise": normal(1, (3, 3, 1, CHANNELS), dtype, 0.3),
            "grouped": normal(2, (3, 3, 2, 16), dtype, 0.3),
            "dilated": kernel(3, (3, 3, 16, CHANNELS), dtype),
            "strided": kernel(4, (2, 2, CHANNELS, CHANNELS), dtype),
            "up": kernel(5, (2, 2, CHANNELS, CHANNELS), dtype),
            "line": kernel(6, (3, CHANNELS, CHANNELS), dtype),
            "head": dense_params(7, CHANNELS, CLASSES, dtype),
        }
        return start(params)

    def loss(params, image, label):
        x = jnp.tanh(_conv(image, params["stem"]))
        x = jnp.tanh(_conv(x, params["depthwise"], feature_group_count=CHANNELS))
        x = jnp.tanh(_conv(x, params["grouped"], feature_group_count=4))
        x = jnp.tanh(_conv(x, params["dilated"], rhs_dilation=(2, 2)))
        x = jnp.tanh(_conv(x, params["strided"], window_strides=(2, 2), padding="VALID"))
        x = jnp.tanh(_conv(x, params["up"], lhs_dilation=(2, 2), padding=((1, 1), (1, 1))))
        line = x.mean(1)
        line = jax.lax.conv_general_dilated(
            line, params["line"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )
        pooled = jax.lax.reduce_window(
            jnp.tanh(line), 0.0, jax.lax.add, (1, 3, 1), (1, 2, 1), "SAME"
        )
        return classified(dense(params["head"], pooled.max(1)), label)

    return Program(init=init, batches=_images, step=learning(loss), covers="I2")


@program
def per_example_gradients_of_a_convolution():
    """vmap of grad: the rows become groups of one convolution."""

    def init(dtype):
        params = {
            "conv": kernel(0, (3, 3, 3, CHANNELS), dtype),
            "head": dense_params(1, CHANNELS, CLASSES, dtype),
        }
        return start(params)

    def step(state, image, label):
        def row_loss(params, one, target):
            x = jnp.tanh(_conv(one[None], params["conv"])).mean((1, 2))
            return cross_entropies(dense(params["head"], x)[0], target)

        grad_fn = jax.vmap(jax.value_and_grad(row_loss), in_axes=(None, 0, 0))
        losses, grads = grad_fn(state["params"], image, label)
        norms = jax.vmap(optax.tree.norm)(grads)
        scale = jnp.minimum(1.0, 0.7 / norms)
        grads = jax.tree.map(lambda g: jnp.tensordot(scale, g, axes=1) / len(norms), grads)
        updates, opt = SGD.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt}, {"losses": losses, "norms": norms}

    return Program(init=init, batches=_images, step=step, covers="A1 I2")


@relative
def normalisations():
    """Layer, group, instance and weight norms, and one over batch and channels."""

    def init(dtype):
        params = {
            "stem": kernel(0, (3, 3, 3, CHANNELS), dtype),
            "gain": 1 + normal(1, (4, CHANNELS), dtype, 0.1),
            "head": dense_params(2, CHANNELS, CLASSES, dtype),
        }
        return start(params)

    def normed(x, dims):
        return (x - x.mean(dims, keepdims=True)) / jnp.sqrt(x.var(dims, keepdims=True) + 1e-2)

    def loss(params, image, label):
        w = params["stem"]
        w = w / jnp.sqrt((w**2).sum((0, 1, 2), keepdims=True) + 1e-3)
        gains = [gain[None, None, None] for gain in params["gain"]]
        x = _conv(image, w)
        x = jnp.tanh(normed(x, -1) * gains[0])
        b, h, width, c = x.shape
        grouped = normed(x.reshape(b, h, width, 4, c // 4), (1, 2, 4))
        x = jnp.tanh(grouped.reshape(x.shape) * gains[1])
        x = jnp.tanh(normed(x, (1, 2)) * gains[2] + x)
        x = jnp.tanh(normed(x, (0, 3)) * gains[3] + x)
        return classified(dense(params["head"], x.mean((1, 2))), label)

    return Program(init=init, batches=_images, step=learning(loss), covers="I2 A8")


@program
def lstm():
    """Gates from one kernel, a scan over time, sequences of different lengths."""
    hidden, length = 8, 5

    def init(dtype):
        params = {
            "cell": dense_params(0, FEATURES + hidden, 4 * hidden, dtype),
            "head": dense_params(2, hidden, CLASSES, dtype),
        }
        return start(params)

    def loss(params, x, label, lengths):
        def turn(carry, token):
            h, c = carry
            joined = dense(params["cell"], jnp.concatenate([token, h], axis=-1))
            i, f, g, o = jnp.split(joined, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[0], hidden), x.dtype)
        _, all_h = jax.lax.scan(turn, (zeros, zeros), x.swapaxes(0, 1), unroll=2)
        last = all_h[lengths - 1, jnp.arange(x.shape[0])]
        return classified(dense(params["head"], last), label)

    def batches(num_steps, dtype):
        rng = np.random.default_rng(4)
        return [
            (
                rng.normal(size=(ROWS, length, FEATURES)).astype(dtype),
                rng.integers(0, CLASSES, ROWS).astype(np.int32),
                rng.integers(1, length + 1, ROWS).astype(np.int32),
            )
            for _ in range(num_steps)
        ]

    return Program(init=init, batches=batches, step=learning(loss), covers="I2")


@program
def state_space_model():
    """A diagonal recurrence by associative_scan over time, after a cumulative gate."""
    length = 8

    def init(dtype):
        params = {
            "decay": normal(0, (WIDTH,), dtype),
            "in": dense_params(1, FEATURES, WIDTH, dtype),
            "gate": dense_params(3, FEATURES, WIDTH, dtype),
            "out": dense_params(5, WIDTH, FEATURES, dtype),
        }
        return start(params)

    def loss(params, x):
        rows = x[:, :-1]
        keep = jax.nn.sigmoid(dense(params["gate"], rows) + params["decay"][None, None])
        values = (1 - keep) * dense(params["in"], rows)

        def combine(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, h = jax.lax.associative_scan(combine, (keep, values), axis=1)
        made = dense(params["out"], jnp.tanh(h + 0.1 * jnp.cumsum(values, axis=1)))
        errors = ((made - x[:, 1:]) ** 2).mean((1, 2))
        return errors.mean(), {"errors": errors, "last": h[:, -1, 0]}

    batches = normals((ROWS, length, FEATURES))
    return Program(init=init, batches=batches, step=learning(loss), covers="I2")


@program
def gan():
    """Two networks; the discriminator sees a real and a made batch as one, with a batch statistic."""

    def init(dtype):
        generator = mlp_params(dtype, (FEATURES, WIDTH, FEATURES))
        critic = mlp_params(dtype, (FEATURES + 1, WIDTH, 1), seed=40)
        both = {"generator": generator, "critic": critic}
        return {"params": both, "opt": jax.tree.map(SGD.init, both, is_leaf=_is_list)}

    def judged(critic, rows):
        spread = jnp.broadcast_to(rows.std(0).mean(), (rows.shape[0], 1))
        return mlp(critic, jnp.concatenate([rows, spread], axis=1))[:, 0]

    def step(state, real, noise):
        params, opt = state["params"], state["opt"]

        def critic_loss(critic):
            fake = jax.lax.stop_gradient(mlp(params["generator"], noise))
            scores = judged(critic, jnp.concatenate([real, fake]))
            good, bad = jnp.split(scores, 2)
            return jax.nn.softplus(-good).mean() + jax.nn.softplus(bad).mean(), scores

        (d_loss, scores), grads = jax.value_and_grad(critic_loss, has_aux=True)(params["critic"])
        updates, critic_opt = SGD.update(grads, opt["critic"])
        critic = optax.apply_updates(params["critic"], updates)

        def generator_loss(generator):
            return jax.nn.softplus(-judged(critic, mlp(generator, noise))).mean()

        g_loss, grads = jax.value_and_grad(generator_loss)(params["generator"])
        updates, generator_opt = SGD.update(grads, opt["generator"])
        generator = optax.apply_updates(params["generator"], updates)
        state = {
            "params": {"generator": generator, "critic": critic},
            "opt": {"generator": generator_opt, "critic": critic_opt},
        }
        return state, {"critic": d_loss, "generator": g_loss, "scores": scores}

    batches = normals((ROWS, FEATURES), (ROWS, FEATURES))
    return Program(init=init, batches=batches, step=step, covers="I2 A8")


def _is_list(tree):
    return isinstance(tree, list)


@program
def vae():
    """Sums over features and rows, noise from a key, a few reconstructions as outputs."""
    latent = 4

    def init(dtype):
        params = {
            "encoder": mlp_params(dtype, (FEATURES, WIDTH, 2 * latent)),
            "decoder": mlp_params(dtype, (latent, WIDTH, FEATURES), seed=40),
        }
        return start(params, optax.sgd(1e-2))

    def loss(params, x, key):
        mean, log_var = jnp.split(mlp(params["encoder"], x), 2, axis=-1)
        noise = jax.random.normal(key, mean.shape, mean.dtype)
        made = mlp(params["decoder"], mean + jnp.exp(log_var / 2) * noise)
        error = ((made - x) ** 2).sum()
        kl = 0.5 * (jnp.exp(log_var) + mean**2 - 1 - log_var).sum()
        per_latent = (mean.var(0) > 0.01).sum()
        return (error + kl) / x.shape[0], {"recon": made[:3], "kl": kl, "active": per_latent}

    batches = with_arguments(normals((ROWS, FEATURES)), lambda i, _: (jax.random.key(i),))
    return Program(
        init=init, batches=batches, step=learning(loss, optax.sgd(0.01)), covers="A7 A5 I3"
    )


@program
def moe_with_a_capacity():
    """Rows queue for experts by a cumulative sum over the batch; who comes too late is dropped."""
    num_experts, capacity = 4, 10

    def init(dtype):
        params = {
            "router": normal(0, (FEATURES, num_experts), dtype),
            "up": normal(1, (num_experts, FEATURES, WIDTH), dtype, 0.3),
            "down": normal(2, (num_experts, WIDTH, FEATURES), dtype, 0.3),
            "head": dense_params(3, FEATURES, CLASSES, dtype),
        }
        return start(params)

    def loss(params, x, label):
        gates = jax.nn.softmax(x @ params["router"])
        top, chosen = jax.lax.top_k(gates, 2)
        hot = jax.nn.one_hot(chosen, num_experts, dtype=jnp.int32)
        first = hot[:, 0]
        places = jnp.cumsum(hot.transpose(1, 0, 2).reshape(-1, num_experts), axis=0) - 1
        places = places.reshape(2, -1, num_experts).transpose(1, 0, 2)
        fits = (places < capacity) & (hot > 0)
        slot = jax.nn.one_hot(places, capacity, dtype=x.dtype) * fits[..., None]
        send = slot.sum(1)
        combine = (slot * top[..., None, None]).sum(1)
        inside = jnp.einsum("bf,bec->ecf", x, send)
        h = jax.nn.silu(jnp.einsum("ecf,efw->ecw", inside, params["up"]))
        out = jnp.einsum("ecw,ewf->ecf", h, params["down"])
        y = x + jnp.einsum("bec,ecf->bf", combine, out)
        losses = cross_entropies(dense(params["head"], y), label)
        balance = num_experts * (first.mean(0, dtype=x.dtype) * gates.mean(0)).sum()
        dropped = (~fits.any(-1)).sum()
        outputs = {"dropped": dropped, "load": hot.sum((0, 1)), "losses": losses}
        return losses.mean() + 0.1 * balance, outputs

    return Program(init=init, batches=labelled, step=learning(loss), covers="A8 A7 I2")


@program
def moe_by_ragged_dot():
    """Rows are sorted by expert, multiplied by ragged_dot, and put back."""
    num_experts = 4

    def init(dtype):
        params = {
            "router": normal(0, (FEATURES, num_experts), dtype),
            "up": normal(1, (num_experts, FEATURES, WIDTH), dtype, 0.3),
            "head": dense_params(3, WIDTH, CLASSES, dtype),
        }
        return start(params)

    def loss(params, x, label):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = gates.argmax(-1)
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.bincount(chosen, length=num_experts).astype(jnp.int32)
        h = jax.lax.ragged_dot(x[order], params["up"], sizes)
        back = jnp.zeros_like(h).at[order].set(jax.nn.silu(h))
        back = back * jnp.take_along_axis(gates, chosen[:, None], 1)
        losses = cross_entropies(dense(params["head"], back), label)
        return losses.mean(), {"sizes": sizes, "losses": losses}

    return Program(init=init, batches=labelled, step=learning(loss), covers="A8 A7 I2")


@program
def ppo():
    """Epochs of minibatches by permutation, reshape and scan; advantages normalised in each one."""
    tx = adamw(3e-3)

    def init(dtype):
        params = {
            "policy": mlp_params(dtype),
            "value": mlp_params(dtype, (FEATURES, 8, 1), seed=40),
        }
        return start(params, tx)

    def step(state, x, action, reward, old_log_prob, key):
        def minibatch(state, rows):
            x, action, reward, old = rows
            advantage = (reward - reward.mean()) / (reward.std() + 1e-2)

            def loss_fn(params):
                log_probs = jax.nn.log_softmax(mlp(params["policy"], x))
                new = jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0]
                ratio = jnp.exp(new - old)
                clipped = jnp.clip(ratio, 0.8, 1.2)
                gain = jnp.minimum(ratio * advantage, clipped * advantage).mean()
                error = ((mlp(params["value"], x)[:, 0] - reward) ** 2).mean()
                return 0.5 * error - gain, {"clipped": (ratio != clipped).sum()}

            return learn(state, loss_fn, tx)

        def epoch(state, key):
            order = jax.random.permutation(key, x.shape[0])
            rows = x, action, reward, old_log_prob
            parts = jax.tree.map(lambda a: a[order].reshape(4, -1, *a.shape[1:]), rows)
            return jax.lax.scan(minibatch, state, parts)

        return jax.lax.scan(epoch, state, jax.random.split(key, 2))

    def more(i, dtype):
        rng = np.random.default_rng(60 + i)
        old = -np.abs(rng.normal(size=ROWS)) - 1.5
        return rng.normal(size=ROWS).astype(dtype), old.astype(dtype), jax.random.key(i)

    batches = with_arguments(labelled, more)
    return Program(init=init, batches=batches, step=step, covers="A8 I4 I3")


@relative
def ppo_over_time_and_rows():
    """Advantages by a scan over time, then [time, rows] merged and cut into minibatches."""
    length = 6

    def step(state, x, reward, key):
        values = mlp(state["params"], x)[..., 0]

        def turn(after, now):
            value, following, got = now
            after = got + 0.9 * following - value + 0.8 * after
            return after, after

        following = jnp.concatenate([values[1:], jnp.zeros_like(values[:1])])
        first = jnp.zeros(x.shape[1], x.dtype)
        _, gae = jax.lax.scan(turn, first, (values, following, reward), reverse=True)
        targets = gae + values
        gae = (gae - gae.mean()) / (gae.std() + 1e-2)
        order = jax.random.permutation(key, length * x.shape[1])
        merged = [a.reshape(-1, *a.shape[2:])[order] for a in (x, targets, gae)]
        parts = [a.reshape(3, -1, *a.shape[1:]) for a in merged]

        def minibatch(state, rows):
            rows, target, weight = rows

            def loss_fn(params):
                errors = (mlp(params, rows)[:, 0] - target) ** 2
                return (jax.nn.softplus(weight) * errors).mean(), {}

            return learn(state, loss_fn)

        state, outputs = jax.lax.scan(minibatch, state, parts)
        return state, {**outputs, "gae": gae}

    def batches(num_steps, dtype):
        rng = np.random.default_rng(14)
        return [
            (
                rng.normal(size=(length, ROWS, FEATURES)).astype(dtype),
                rng.normal(size=(length, ROWS)).astype(dtype),
                jax.random.key(i),
            )
            for i in range(num_steps)
        ]

    return Program(
        init=mlp_of(FEATURES, WIDTH, 1),
        batches=batches,
        step=step,
        covers="A8 A4 I4",
        row_dims={"x": 1, "reward": 1},
    )


def _graphs(num_steps, dtype):
    """16 graphs of different sizes, packed: 64 nodes and 96 edges, the last ones padding."""
    rng = np.random.default_rng(15)

    def batch():
        sizes = rng.integers(2, 5, 15)
        sizes = np.append(sizes, 64 - sizes.sum())
        graph_of_node = np.repeat(np.arange(16), sizes).astype(np.int32)
        starts = np.cumsum(sizes) - sizes
        graph = np.sort(rng.integers(0, 15, 96))
        ends = [starts[graph] + rng.integers(0, sizes[graph]) for _ in range(2)]
        ends = [np.where(np.arange(96) < 90, end, 63).astype(np.int32) for end in ends]
        return {
            "nodes": rng.normal(size=(64, FEATURES)).astype(dtype),
            "senders": ends[0],
            "receivers": ends[1],
            "graph_of_node": graph_of_node,
            "label": rng.integers(0, CLASSES, 16).astype(np.int32),
        }

    return [(batch(),) for _ in range(num_steps)]


@program
def graphs():
    """Messages along edges by gathers and segment sums, maxima and softmaxes; a packed batch."""

    def init(dtype):
        params = {
            "message": dense_params(0, 2 * FEATURES, FEATURES, dtype),
            "score": normal(2, (FEATURES,), dtype),
            "node": dense_params(3, 2 * FEATURES, FEATURES, dtype),
            "head": dense_params(5, 2 * FEATURES, CLASSES, dtype),
        }
        return start(params)

    def step(state, batch):
        num_nodes, num_graphs = batch["nodes"].shape[0], batch["label"].shape[0]
        is_edge = batch["receivers"] < num_nodes - 1

        def layer(params, nodes):
            ends = jnp.concatenate([nodes[batch["senders"]], nodes[batch["receivers"]]], axis=-1)
            messages = jnp.tanh(dense(params["message"], ends))
            scores = jnp.where(is_edge, messages @ params["score"], -1e9)
            largest = jax.ops.segment_max(scores, batch["receivers"], num_nodes)
            largest = jnp.maximum(jax.lax.stop_gradient(largest), -1e6)
            shares = jnp.where(is_edge, jnp.exp(scores - largest[batch["receivers"]]), 0)
            totals = jax.ops.segment_sum(shares, batch["receivers"], num_nodes)
            shares = shares / (totals[batch["receivers"]] + 1e-6)
            inbox = jax.ops.segment_sum(shares[:, None] * messages, batch["receivers"], num_nodes)
            return jnp.tanh(dense(params["node"], jnp.concatenate([nodes, inbox], axis=-1)))

        def loss_fn(params):
            nodes = layer(params, layer(params, batch["nodes"]))
            of = batch["graph_of_node"]
            sums = jax.ops.segment_sum(nodes, of, num_graphs, indices_are_sorted=True)
            maxima = jax.ops.segment_max(nodes, of, num_graphs, indices_are_sorted=True)
            sizes = jnp.bincount(of, length=num_graphs)
            pooled = jnp.concatenate([sums / sizes[:, None].astype(nodes.dtype), maxima], axis=-1)
            losses = cross_entropies(dense(params["head"], pooled), batch["label"])
            is_graph = jnp.arange(num_graphs) < num_graphs - 1
            loss = jnp.where(is_graph, losses, 0).sum() / is_graph.sum()
            degrees = jax.ops.segment_sum(is_edge.astype(jnp.int32), batch["receivers"], num_nodes)
            return loss, {"losses": losses, "sizes": sizes, "degrees": degrees}

        return learn(state, loss_fn)

    return Program(init=init, batches=_graphs, step=step, covers="I4 I2 A8")


@program
def fourier_layers():
    """FFTs over positions and features, and one over the batch itself."""
    length = 8

    def init(dtype):
        params = {
            "real": normal(0, (5, FEATURES), dtype),
            "imaginary": normal(1, (5, FEATURES), dtype),
            "head": dense_params(2, FEATURES, CLASSES, dtype),
        }
        return start(params)

    def loss(params, x, label):
        spectrum = jnp.fft.rfft(x, axis=1)
        weights = jax.lax.complex(params["real"], params["imaginary"])
        filtered = jnp.fft.irfft(spectrum * weights[None], n=length, axis=1)
        mixed = jnp.fft.fft2(filtered, axes=(1, 2)).real / length
        logits = dense(params["head"], jnp.tanh(mixed).mean(1))
        along = jnp.abs(jnp.fft.rfft(logits.mean(-1)))
        losses = cross_entropies(logits, label)
        loss = losses.mean() + 0.01 * (along**2).mean()
        return loss, {"along": along, "losses": losses, "mean": spectrum.mean((0, 1))}

    batches = normals((ROWS, length, FEATURES), seed=16, labels=ROWS)

    return Program(init=init, batches=batches, step=learning(loss), covers="I2 B5")


@program
def sorts_over_features():
    """Top-k, sorts, cumulative sums, gathers and arg-reductions over dims that are no batch."""

    def loss(params, x, label):
        z = mlp(params, x)
        top, at = jax.lax.top_k(z, 4)
        ordered = jnp.sort(z, axis=-1)
        order = jnp.argsort(z, axis=-1)
        sums = jnp.cumsum(ordered, axis=-1)
        picked = jnp.take_along_axis(z, order[:, ::3], axis=-1)
        hot = jax.nn.one_hot(at[:, 0], WIDTH, dtype=z.dtype)
        halves = z.reshape(-1, 2, WIDTH // 2).max(1)
        maxout = jnp.median(z, axis=-1) + jnp.quantile(z, 0.3, axis=-1)
        pieces = [top.mean(-1), sums.mean(-1) / WIDTH, picked.std(-1), halves.mean(-1), maxout]
        loss = sum((p**2).mean() for p in pieces) + (hot * z).sum(-1).mean()
        loss += cross_entropies(z, label).mean()
        return loss, {"at": at, "order": order, "best": z.argmax(-1), "worst": z.argmin(-1)}

    return Program(
        init=mlp_of(FEATURES, WIDTH, WIDTH), batches=labelled, step=learning(loss), covers="I2"
    )


@program
def embeddings():
    """Lookups by take, one-hot products and bags of different lengths; rows used often and never."""
    vocab, length = 24, 5

    def init(dtype):
        params = {
            "words": normal(0, (vocab, WIDTH), dtype),
            "tags": normal(1, (7, WIDTH), dtype),
            "places": normal(2, (length, WIDTH), dtype),
            "head": dense_params(3, WIDTH, CLASSES, dtype),
        }
        return start(params)

    def loss(params, words, tags, label):
        hot = jax.nn.one_hot(tags, 7, dtype=params["tags"].dtype)
        x = jnp.take(params["words"], words, axis=0, mode="clip") + hot @ params["tags"]
        x = x + params["places"][None]
        is_word = (words < 20)[..., None]
        bag = jnp.where(is_word, x, 0).sum(1) / jnp.maximum(is_word.sum(1), 1)
        rare = params["words"].at[words[:, 0]].get(mode="fill", fill_value=0)
        losses = cross_entropies(dense(params["head"], jnp.tanh(bag + rare)), label)
        used = jnp.zeros(vocab, jnp.int32).at[words].add(1)
        return losses.mean(), {"used": used, "losses": losses}

    def batches(num_steps, dtype):
        rng = np.random.default_rng(17)
        return [
            (
                rng.integers(0, 24, (ROWS, length)).astype(np.int32),
                rng.integers(0, 7, (ROWS, length)).astype(np.int8),
                rng.integers(0, CLASSES, ROWS).astype(np.int32),
            )
            for _ in range(num_steps)
        ]

    return Program(init=init, batches=batches, step=learning(loss), covers="I2")


@program
def reshapes_of_the_batch():
    """Rows are merged with other dims, split, moved to the middle and the end, stacked, tiled."""

    def loss(params, x, label):
        b = x.shape[0]

        merged = mlp(params, x.reshape(b * 3, FEATURES)).reshape(b, 3, CLASSES)
        moved = jnp.moveaxis(merged, 0, 1)  # 3, rows, classes
        outer = jnp.einsum("tbc,tbd->tcbd", moved, moved)
        dealt = merged.reshape(4, b // 4, 3, CLASSES).swapaxes(0, 1).reshape(b, 3, CLASSES)
        paired = merged.reshape(b // 2, 2 * 3 * CLASSES)
        both = jnp.stack([merged, dealt], axis=1).reshape(2 * b, 3, CLASSES)
        time_first = jnp.swapaxes(merged, 0, 1).reshape(3 * b, CLASSES)
        pieces = [outer, paired, both * both[::-1], time_first.cumsum(-1), dealt * merged]
        loss = sum((p**2).mean() for p in pieces)
        losses = cross_entropies(moved.mean(0), label)
        outputs = {"dealt": dealt[..., 0], "tiled": jnp.tile(losses, 2), "both": both[:, 0, 0]}
        return loss + losses.mean(), outputs

    batches = normals((ROWS, 3, FEATURES), seed=18, labels=ROWS)

    return Program(
        init=mlp_of(FEATURES, WIDTH, CLASSES), batches=batches, step=learning(loss), covers="I2"
    )


@program
def quantised_products():
    """int8 products with scales of rows and of the whole batch, and a straight-through rounding."""

    @jax.custom_vjp
    def rounded(x):
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def loss(params, x, label):
        def product(rows, w):
            row_scale = jnp.abs(rows).max(-1, keepdims=True) / 127
            scale = jnp.abs(w).max(0, keepdims=True) / 127
            a, b = ((v / s).round().astype(jnp.int8) for v, s in ((rows, row_scale), (w, scale)))
            whole = jax.lax.dot_general(
                a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32
            )
            return jax.lax.stop_gradient(whole.astype(rows.dtype) * row_scale * scale), whole

        h, whole = product(x, params[0]["kernel"])
        exact = x @ params[0]["kernel"]
        h = jnp.tanh(exact + (h - jax.lax.stop_gradient(exact)))
        whole_scale = jax.lax.stop_gradient(jnp.abs(x).max()) / 7
        h = h + 0.1 * (rounded(x / whole_scale) * whole_scale).sum(-1, keepdims=True)
        losses = cross_entropies(dense(params[1], h), label)
        return losses.mean(), {"losses": losses, "whole": whole, "sum": whole.sum()}

    return Program(init=mlp_start, batches=labelled, step=learning(loss), covers="I2")


@program
def float8_products():
    """Operands in two formats of float8, scaled by the batch's own maxima, summed in float32."""

    def step(state, x, label):
        def narrow(v, dtype, dims):
            limit = float(jnp.finfo(dtype).max)
            scale = jnp.maximum(jnp.abs(v).max(dims, keepdims=True), 1e-3) / limit
            return (v / scale).astype(dtype), scale

        @jax.custom_vjp
        def product(rows, w):
            (a, a_scale), (b, b_scale) = (narrow(v, jnp.float8_e4m3fn, None) for v in (rows, w))
            out = jax.lax.dot_general(
                a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
            )
            return out.astype(rows.dtype) * a_scale * b_scale

        def backward(saved, g):
            rows, w = saved
            g8, scale = narrow(g, jnp.float8_e5m2, None)
            g = g8.astype(g.dtype) * scale
            return g @ w.T, rows.T @ g

        product.defvjp(lambda rows, w: (product(rows, w), (rows, w)), backward)

        def loss_fn(params):
            h = jnp.tanh(product(x, params[0]["kernel"]))
            return classified(dense(params[1], h), label)

        return learn(state, loss_fn)

    return Program(
        init=mlp_start,
        batches=labelled,
        step=step,
        covers="I2 A9",
        exact_dtypes=("float32",),
        note="products in float8, summed in float32",
    )


@program
def scaled_products():
    """`lax.scaled_dot`: float8 with a scale for each block of what a product sums over, rows among them."""
    block = 4  # Of the batch's 32 rows, too, so that no block is on two of 8 devices.

    def narrow(v):
        blocks = v.reshape(*v.shape[:-1], -1, block)
        most = jnp.maximum(jnp.abs(blocks).max(-1, keepdims=True), 1e-6)
        scales = jnp.exp2(jnp.ceil(jnp.log2(most / 448)))
        codes = (blocks / scales).astype(jnp.float8_e4m3fn).reshape(v.shape)
        return codes[None], scales[None, ..., 0].astype(jnp.float8_e8m0fnu)

    @jax.custom_vjp
    def product(rows, w):
        (a, a_scale), (b, b_scale) = narrow(rows), narrow(w.T)
        out = jax.lax.scaled_dot(
            a, b, lhs_scale=a_scale, rhs_scale=b_scale, preferred_element_type=jnp.float32,
            dimension_numbers=(((2,), (2,)), ((0,), (0,))),
        )  # fmt: skip
        return out[0].astype(rows.dtype)

    def backward(saved, g):
        rows, w = saved
        return product(g, w.T), product(rows.T, g)

    product.defvjp(lambda rows, w: (product(rows, w), (rows, w)), backward)

    def loss(params, x, label):
        h = jnp.tanh(product(x, params[0]["kernel"]))
        h = jnp.tanh(product(h, params[1]["kernel"]))
        return classified(dense(params[2], h), label)

    return Program(
        init=mlp_of(FEATURES, WIDTH, WIDTH, CLASSES),
        batches=labelled,
        step=learning(loss),
        covers="I2 A9",
        exact_dtypes=("float32",),
        note="products in float8, summed in float32",
    )


def sparse_rows(sizes, num, num_steps, dtype):
    """Of each row `num` elements, where each is in an array of these sizes, and a label."""
    rng = np.random.default_rng(4)
    return [
        (
            rng.normal(size=(ROWS, num)).astype(dtype),
            rng.integers(0, sizes, (ROWS, num, len(sizes)), np.int32),
            rng.integers(0, CLASSES, ROWS).astype(np.int32),
        )
        for _ in range(num_steps)
    ]


@program
def sparse_arrays():
    """Rows of a few features each, by index, with trained values; and a sparse matrix that is trained."""
    features, num = 24, 5
    indices = np.argwhere(np.random.default_rng(0).random((WIDTH, CLASSES)) < 0.3)

    def init(dtype):
        return start(
            {
                "values": normal(0, (features,), dtype),
                "table": normal(1, (features, WIDTH), dtype, 0.3),
                "dense": normal(2, (features, WIDTH), dtype, 0.3),
                "elements": normal(3, (len(indices),), dtype),
            }
        )

    def loss(params, data, indices_of_rows, label):
        scaled = data * params["values"][indices_of_rows[..., 0]]
        x = BCOO((scaled, indices_of_rows), shape=(len(data), features))
        h = jnp.tanh(x @ params["table"] + x.todense() @ params["dense"])
        out = BCOO((params["elements"], jnp.asarray(indices)), shape=(WIDTH, CLASSES))
        return classified(h @ out, label)

    return Program(
        init=init, batches=partial(sparse_rows, (features,), num), step=learning(loss), covers="I2 A5"
    )  # fmt: skip


@program
def sparse_arrays_made_in_the_step():
    """Rows are sparse matrices: merged, times a sparse one, sorted, transposed; and sparse activations."""
    num, sizes = 5, (6, 4)
    graph = np.argwhere(np.random.default_rng(7).random((sizes[1], sizes[1])) < 0.4)

    def init(dtype):
        return start(
            {
                "values": normal(0, (sizes[1],), dtype),
                "table": normal(1, (sizes[0], sizes[1], WIDTH), dtype, 0.3),
                "head": normal(2, (WIDTH, CLASSES), dtype, 0.3),
            }
        )

    def loss(params, data, indices, label):
        x = BCOO((data, indices), shape=(len(data), *sizes)).sum_duplicates(nse=num)
        edges = BCOO(
            (jnp.ones(len(graph), data.dtype), jnp.asarray(graph, jnp.int32)),
            shape=sizes[1:] * 2,
        )
        x = (x @ edges).sort_indices()
        scaled = x.data * params["values"][x.indices[..., 1]]
        x = BCOO((scaled, x.indices), shape=x.shape).transpose((0, 2, 1))
        h = jax.nn.relu(jnp.einsum("bji,ijd->bd", x.todense(), params["table"]))
        logits = BCOO.fromdense(h, nse=WIDTH, n_batch=1) @ params["head"]
        return classified(logits, label)

    return Program(
        init=init, batches=partial(sparse_rows, sizes, num), step=learning(loss), covers="I2 A5"
    )  # fmt: skip


@relative
def bfloat16_compute():
    """bf16 parameters and activations from float32 masters; losses in float32."""

    def step(state, x, label):
        def loss_fn(params):
            narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
            logits = mlp(narrow, x.astype(jnp.bfloat16)).astype(jnp.float32)
            losses = cross_entropies(logits, label)
            return losses.mean(), {"correct": (logits.argmax(-1) == label).sum()}

        state, outputs = learn(state, loss_fn)
        return state, {**outputs, "loss": outputs["loss"].astype(jnp.bfloat16)}

    return Program(
        init=mlp_start,
        batches=labelled,
        step=step,
        covers="I2",
        exact_dtypes=("float32",),
        rounded_to="bfloat16",
        note="gradients are summed over rows in bfloat16",
    )


@program
def selects_and_windows():
    """select, clamp, pads, reduce windows with maxima and their scatters, cumulative maxima, gathers."""

    def loss(params, x, at):
        z = mlp(params, x)
        clamped = jax.lax.clamp(jnp.asarray(-0.5, z.dtype), z, jnp.asarray(0.7, z.dtype))
        pooled = jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (1, 4), (1, 2), "SAME")
        chosen = jax.lax.select(z > 0.1, z, 0.2 * z)
        padded = jax.lax.pad(z, jnp.asarray(0.5, z.dtype), ((0, 0, 0), (2, -1, 1)))
        part = jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, 5))(z, at)
        written = jax.vmap(lambda row, p, i: jax.lax.dynamic_update_slice(row, p, (i,)))(
            z, 2 * part, at
        )
        rising = jax.lax.cummax(z, axis=1)
        cases = jnp.select([z > 1, z < -1], [z**2, -z], 0.5 * z)
        pieces = [clamped, pooled, chosen, padded, part, written, rising, cases]
        losses = sum((p**2).mean(-1) for p in pieces)
        return losses.mean(), {"losses": losses, "part": part}

    def places(i, dtype):
        return (np.random.default_rng(70 + i).integers(0, 12, ROWS).astype(np.int32),)

    batches = with_arguments(normals((ROWS, FEATURES)), places)
    return Program(
        init=mlp_of(FEATURES, WIDTH, WIDTH), batches=batches, step=learning(loss), covers="I2"
    )
