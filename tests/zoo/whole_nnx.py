"""A whole program with Flax NNX."""

import jax.numpy as jnp
import optax
from flax import nnx

from ._script import NUM_STEPS, images, script


@script(author=nnx.jit)
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
