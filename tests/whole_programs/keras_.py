"""Whole programs with Keras on JAX: its stateless API, whose state is lists of arrays, and `fit`."""

import os
from typing import Any

import jax
import numpy as np

from ._program import NUM_STEPS, images, program

os.environ["KERAS_BACKEND"] = "jax"  # as such a script begins


def make_model() -> tuple[Any, Any]:
    """A model and its optimizer."""
    import keras

    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(8, 3, strides=2, use_bias=False)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.9)(x)
    x = keras.layers.Flatten()(keras.activations.silu(x))
    x = keras.layers.Dense(32, activation="tanh")(keras.layers.Dropout(0.2, seed=1)(x))
    model = keras.Model(inputs, keras.layers.Dense(10)(x))
    # SGD: the bias before the softmax's mean has a gradient that Adam would make too much of.
    return model, keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)


@program()
def keras_fit(jit):
    """The step that `fit` calls and compiles in a program of its own; a last batch of fewer rows."""
    import keras

    model, optimizer = make_model()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss_fn, metrics=["accuracy"])
    model.train_step = jit(model.train_step)
    data = images(NUM_STEPS)
    x, y = [np.concatenate([batch[name] for batch in data])[:-8] for name in ("image", "label")]
    history = model.fit(
        x, y, epochs=2, batch_size=16, shuffle=False, validation_data=(x, y), verbose=0
    ).history
    predicted = model.predict(x, verbose=0)
    return [v.value for v in [*model.variables, *optimizer.variables]], history, predicted


@program()
def keras_stateless(jit):
    """`loss, state`, where the state is lists: variables, moving averages, seeds, the optimizer's."""
    import keras

    model, optimizer = make_model()
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric: Any = keras.metrics.SparseCategoricalAccuracy()

    def compute_loss(trainable, non_trainable, metric_variables, x, y):
        y_pred, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        metric_variables = metric.stateless_update_state(metric_variables, y, y_pred)
        return loss_fn(y, y_pred), (non_trainable, metric_variables)

    grad_fn = jax.value_and_grad(compute_loss, has_aux=True)

    @jit
    def train_step(state, data):
        trainable, non_trainable, optimizer_variables, metric_variables = state
        x, y = data
        (loss, (non_trainable, metric_variables)), grads = grad_fn(
            trainable, non_trainable, metric_variables, x, y
        )
        trainable, optimizer_variables = optimizer.stateless_apply(
            optimizer_variables, grads, trainable
        )
        return loss, (trainable, non_trainable, optimizer_variables, metric_variables)

    @jax.jit
    def predict(trainable, non_trainable, x):
        return model.stateless_call(trainable, non_trainable, x, training=False)[0]

    *train, test = images(NUM_STEPS + 1)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
        [v.value for v in optimizer.variables],
        [v.value for v in metric.variables],
    )
    log = []
    for batch in train:
        loss, state = train_step(state, (batch["image"], batch["label"]))
        log.append((float(loss), metric.stateless_result(state[-1])))
    logits = predict(*state[:2], test["image"])
    owners = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    for variables, values in zip(owners, state, strict=False):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    predicted = model.predict(test["image"], verbose=0)
    return [v.value for variables in owners for v in variables], log, logits, predicted
