# SPDX-License-Identifier: Apache-2.0
"""Targets of `jzero.from_deepspeed`: DeepSpeed's schedules, and optimizers that optax lacks."""

from jzero.deepspeed._schedules import lr_range_test as lr_range_test
from jzero.deepspeed._schedules import one_cycle as one_cycle
from jzero.deepspeed._schedules import one_cycle_momentum as one_cycle_momentum
from jzero.deepspeed._schedules import warmup_cosine_lr as warmup_cosine_lr
from jzero.deepspeed._schedules import warmup_decay_lr as warmup_decay_lr
from jzero.deepspeed._schedules import warmup_lr as warmup_lr
from jzero.deepspeed._transforms import adagrad as adagrad
from jzero.deepspeed._transforms import lamb as lamb
from jzero.deepspeed._translate import Translation as Translation
