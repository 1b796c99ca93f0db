"""A whole program with Flax NNX."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ._program import NUM_STEPS, images, program, tokens


@program(author=nnx.jit)
def nnx_loop(jit):
    """A model with its own keys, metrics that are updated, read and reset; another step evaluates."""

    class Classifier(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(1, 8, (3, 3), strides=2, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
            self.dropout = nnx.Dropout(0.2, rngs=rngs)
            self.cell = nnx.GRUCell(32, 16, rngs=rngs)
            self.head = nnx.Linear(16, 10, rngs=rngs)

        def __call__(self, x):
            x = self.dropout(nnx.silu(self.norm(self.conv(x))))
            x = x.reshape(len(x), 4, -1)
            carry = jnp.zeros((len(x), 16))
            for i in range(4):
                carry, _ = self.cell(carry, x[:, i])
            return self.head(carry)

    def loss_fn(model, batch):
        logits = model(batch["image"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, logits

    @jit
    def train_step(model, optimizer, metrics, batch):
        grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
        (loss, logits), grads = grad_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, batch):
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    *train, test = images(NUM_STEPS + 2)
    model = Classifier(nnx.Rngs(0, dropout=1))
    tx = optax.sgd(0.05, momentum=0.9, nesterov=True)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    history = []
    for step, batch in enumerate(train):
        model.train()
        train_step(model, optimizer, metrics, batch)
        if step % 2 == 1:
            found = {f"train_{name}": value for name, value in metrics.compute().items()}
            metrics.reset()
            model.eval()
            eval_step(model, metrics, test)
            found |= {f"test_{name}": value for name, value in metrics.compute().items()}
            metrics.reset()
            history.append(found)
    return nnx.state(model), nnx.state(optimizer), history


@program(author=nnx.jit)
def nnx_trainer(jit):
    """A jitted method of a class that is no module, which returns the loss."""

    class LM(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(24, 16, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
            self.decay = nnx.Param(jnp.full(16, 0.5))

        def __call__(self, idx):
            x = self.embed(idx)
            decayed = lambda carry, x: (self.decay * carry + x,) * 2  # noqa: E731
            x = jax.lax.scan(decayed, jnp.zeros((len(idx), 16)), x.swapaxes(0, 1))[1]
            x = x.swapaxes(0, 1)
            for block in self.blocks:
                x = x + nnx.gelu(block(x))
            return self.embed.attend(x)

    class Trainer:
        def __init__(self):
            self.model = LM(nnx.Rngs(0))
            tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2, eps=1e-3))
            self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)
            self.step = jit(self.train_step)

        @staticmethod
        def train_step(model, optimizer, x, y):
            def loss_fn(model):
                losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
                return losses.mean()

            loss, grads = nnx.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return loss

        def fit(self, data):
            return [
                self.step(self.model, self.optimizer, idx[:, :-1], idx[:, 1:]).item()
                for idx in data
            ]

    trainer = Trainer()
    losses = trainer.fit(tokens())
    return (
        nnx.state(trainer.model),
        nnx.state(trainer.optimizer),
        losses,
        trainer.model(tokens(1)[0]),
    )
