"""Whole training scripts, each run twice: as its author wrote it on one device, and with jzero on several.

What differs between the two is the line in which the author wrote `jax.jit`, `nnx.jit` or `eqx.filter_jit`,
which no longer says `donate_argnums`. All that a script is left with is compared: parameters,
optimizer states, keys, the metrics of every step, what it evaluated, sampled or read back from a checkpoint.

| program | lines changed | what its line says beside `shard_train_step(step)` |
| --- | --- | --- |
| haiku_classifier, gan, jmp_loss_scale | 1 | |
| wgan_two_steps | 2 | two steps, a line each |
| keras_stateless, keras_fit | 1 | |
| nanodo_trainer, big_vision, purejaxrl_ppo, ddpm, stateful_lstm, distillation | 1 | |
| lora_partial, clip_towers, multi_steps, jaxrl_agent, cleanrl_dqn | 1 | |
| nnx_loop, nnx_trainer, equinox_vit | 1 | |
| maml_stax, realnvp, lbfgs, svi_class, graph_network | 1 | |
| neural_ode, vmapped_ensemble | 1 | |
| scanned_epoch | 1 | `in_specs`: its rows are along dim 1; without it every device trains with all of them |
| gpt_class | 1 | `static_argnums=0`, as it did |
| sgld | 1 | `donate=False`, since the script keeps what earlier steps returned |
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import pytest

import small
import zoo
from whole_programs import PROGRAMS


def settings():
    for name in PROGRAMS:
        for stage, num in ((3, 8), (1, 4)):
            yield pytest.param(name, stage, num, id=f"{name}-stage{stage}-{num}devices")


@pytest.mark.slow(but=["haiku_classifier-stage3-8devices", "nnx_loop-stage3-8devices"])
@pytest.mark.parametrize(("name", "stage", "num_devices"), list(settings()))
def test_trains_as_its_author_does(name, stage, num_devices):
    actual = run(name, sharding(stage, num_devices, **PROGRAMS[name].options))
    if stage == 3:  # At stage 1 what a script is left with may be parameters alone.
        assert any(is_sharded(leaf, num_devices) for leaf in jax.tree.leaves(actual))
    zoo.assert_trees_close(zoo.to_host(actual), expected(name), PROGRAMS[name].tolerance, name)


@pytest.mark.slow
def test_a_wrong_batch_is_noticed():
    def forgetful(step):
        calls = []

        def call(state, *batch):
            calls.append(batch)
            return jax.jit(step)(state, *calls[max(0, len(calls) - 2)])

        return call

    actual = zoo.to_host(run("svi_class", forgetful))
    with pytest.raises(AssertionError, match="elements differ"):
        zoo.assert_trees_close(actual, expected("svi_class"), zoo.FP32, "svi_class")


def sharding(stage: int, num_devices: int, **options: Any) -> Callable[..., Any]:
    """What a program takes in place of `jax.jit`; jzero donates by itself."""
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])

    def jit(
        step: Any = None, *, donate_argnums: Any = (), donate_argnames: Any = (), **said: Any
    ) -> Any:
        return small.shard_train_step(step, stage=stage, mesh=mesh, **said, **options)

    return jit


def run(name: str, jit: Callable[..., Any]) -> Any:
    with jax.numpy_rank_promotion("allow"):  # JAX's default, for which scripts are written
        return PROGRAMS[name].run(jit)


@functools.cache
def expected(name: str) -> Any:
    return zoo.to_host(run(name, PROGRAMS[name].author))


def is_sharded(leaf: Any, num_devices: int) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return (
        sharding is not None
        and not sharding.is_fully_replicated
        and len(sharding.device_set) == num_devices
    )
