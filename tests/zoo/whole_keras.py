"""Whole programs with Keras on JAX: its stateless API, whose state is lists of arrays, and `fit`."""

import os
from typing import Any

import numpy as np

from ._script import NUM_STEPS, images, script

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


@script()
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
