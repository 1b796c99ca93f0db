# SPDX-License-Identifier: Apache-2.0
"""The section `optimizer` of a DeepSpeed configuration, as an optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import optax

from jzero import _json
from jzero.deepspeed import _transforms
from jzero.deepspeed._expressions import Expression, called
from jzero.deepspeed._keys import Key
from jzero.deepspeed._parameters import parameters
from jzero.deepspeed._schedulers import Scheduled
from jzero.deepspeed._settings import Settings, nearest, refuse

_SECTION = "optimizer"
_FUSION = Key("any", note="Nothing to set: XLA fuses the update.")
_OFF = (False,)
_COMMON = {
    "amsgrad": Key("bool", accepts=_OFF, refused="jzero translates no AMSGrad: use optax.amsgrad."),
    "maximize": Key("bool", accepts=_OFF, refused="Negate the loss."),
    "fp32_optimizer_states": Key(
        "bool", accepts=(True,), refused="Moments have the dtype of the masters, float32."),
    **dict.fromkeys(("set_grad_none", "fused", "foreach", "capturable", "differentiable"), _FUSION),
}  # fmt: skip
_LR, _DECAY = Key("number", default=1e-3), Key("number", default=0.0)
_BETAS, _EPS = Key("betas", default=(0.9, 0.999)), Key("number", default=1e-8)
_CORRECTED = Key(
    "bool", accepts=(True,), refused="optax always corrects Adam's moments for their start at 0."
)
_ADAM: dict[str, Key] = {
    "lr": _LR, "betas": _BETAS, "eps": _EPS, "weight_decay": Key("number"),
    "bias_correction": _CORRECTED, "torch_adam": Key("bool"), "adam_w_mode": Key("bool"),
    **_COMMON,
}  # fmt: skip
_TAKES: dict[str, dict[str, Key]] = {
    "adam": _ADAM,
    "adamw": {**_ADAM, "adam_w_mode": Key(
        "bool", accepts=(True,), refused="DeepSpeed's AdamW is AdamW all the same: write Adam, or drop it.")},
    "lamb": {
        "lr": _LR, "betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY, "max_coeff": Key("number"),
        "min_coeff": Key("number"), "bias_correction": Key("bool"),
        "eps_inside_sqrt": Key("bool", accepts=_OFF, refused="jzero.deepspeed.lamb adds eps to the root."),
        **_COMMON},
    "lion": {"lr": _LR, "betas": _BETAS, "weight_decay": _DECAY, **_COMMON},
    "adagrad": {
        "lr": Key("number", default=1e-2), "eps": Key("number"), "weight_decay": _DECAY,
        "initial_accumulator_value": Key("number"),
        "lr_decay": Key("number", accepts=(0,), refused="Say it with a schedule."), **_COMMON},
    "sgd": {
        "lr": _LR, "momentum": Key("number"), "nesterov": Key("bool"), "weight_decay": _DECAY,
        "dampening": Key("number", accepts=(0,), refused="optax.sgd has none."), **_COMMON},
}  # fmt: skip
_ONE_BIT = "Its compressed communication has no counterpart: use Adam or Lamb, which train alike without it."
_MUP = (
    "It scales the learning rate by the width of each layer, which only the model knows: use optax."
)
_REFUSED = {
    "onebitadam": _ONE_BIT, "zerooneadam": _ONE_BIT, "onebitlamb": _ONE_BIT,
    "muadam": _MUP, "muadamw": _MUP, "musgd": _MUP,
    "muon": "Which parameters are Muon's is marked in the model and not here, and optax.contrib.muon "
    "differs (it corrects the momentum for its start, and its Adam has Nesterov's momentum, too): drop the "
    "section, and write optax.contrib.muon.",
}  # fmt: skip
_OTHER = "Write one of them, or drop the section and write your own in optax."


@dataclasses.dataclass(frozen=True)
class Chosen:
    """An optimizer of the configuration, in optax's words.

    Attributes:
      name: of its function, as Python has it.
      function: `optax.adamw`, or one of `_transforms.py`.
      lr: its learning rate, unless a scheduler sets it.
      arguments: the others.
      decay: of the parameters, added to the gradients before (L2); 0 for none.
    """

    name: str
    function: Callable[..., Any]
    lr: float
    arguments: dict[str, Any]
    decay: float = 0.0


def chosen(settings: Settings) -> Chosen | None:
    """The section, checked; None if there is none. It tells the settings what became of the parameters.

    Raises:
      OptionError: an optimizer that jzero does not translate, or parameters that it does not take.
    """
    if _SECTION not in settings.given:
        return None
    written = settings.get("optimizer.type")
    name = str(written).lower()
    if written is None or name not in _TAKES:
        found = (
            "no type"
            if written is None
            else f"the type {_json.shown(written)}{nearest(name, list(_TAKES))}"
        )
        raise refuse(
            f"optimizer has {found}", "jzero translates Adam, AdamW, Lamb, Lion, Adagrad and SGD.",
            _REFUSED.get(name, "Write one of them, or drop the section, and use your own."))  # fmt: skip
    if "max_grad_norm" in (settings.get("optimizer.params") or {}):
        raise refuse(
            "optimizer.params.max_grad_norm", "DeepSpeed clips by gradient_clipping, and so does jzero.",
            "Drop it: gradient_clipping is there." if "gradient_clipping" in settings.given
            else "Write gradient_clipping.")  # fmt: skip
    given = parameters(settings, _SECTION, written, _TAKES[name])
    if "betas" in given:
        b1, b2 = given.pop("betas")
        given = {"b1": b1, "b2": b2, **given}
    return _adam(given) if name.startswith("adam") else _other(name, given)


def parts(chosen: Chosen, rate: Expression | None, scheduled: Scheduled | None) -> list[Expression]:
    """The parts of the chain: decay that is added to gradients, if there is, and the optimizer.

    Args:
      chosen: the optimizer.
      rate: the scheduled learning rate; None for the optimizer's own.
      scheduled: what a scheduler sets.
    """
    name, function, arguments = chosen.name, chosen.function, dict(chosen.arguments)
    if scheduled is not None and scheduled.first_beta is not None and "b1" in arguments:
        # DeepSpeed's OneCycle sets the second beta, too.
        arguments.update(b1=scheduled.first_beta, b2=0.99)
        name, function = f"optax.inject_hyperparams({name})", optax.inject_hyperparams(function)
    decay = [called("optax.add_decayed_weights", optax.add_decayed_weights, chosen.decay)]
    optimizer = called(name, function, chosen.lr if rate is None else rate, **arguments)
    return [*decay, optimizer] if chosen.decay else [optimizer]


def sentences(chosen: Chosen, written: str, scheduled: Scheduled | None) -> Iterator[str]:
    """What an optimizer that is `written` so became, and where that is not what its name says."""
    yield f"{chosen.name}, with DeepSpeed's defaults for what is not given."
    if written.lower() == "adam" and chosen.function is optax.adamw:
        yield "In DeepSpeed Adam is AdamW, unless adam_w_mode is false."
    if chosen.decay:
        yield "Decay is added to the gradients, before the moments."
    if scheduled is None:
        return
    yield "The scheduler sets the learning rate."
    if scheduled.first_beta is not None and "b1" in chosen.arguments:
        yield "OneCycle sets both betas, the second to 0.99, unless cycle_momentum is false."
    elif scheduled.first_beta is not None:
        yield "It has no betas for OneCycle to set."


def _adam(given: dict[str, Any]) -> Chosen:
    """AdamW unless it says otherwise, whatever its name; only torch's AdamW decays by default."""
    torch, decoupled = given.pop("torch_adam", False), given.pop("adam_w_mode", True)
    decay = given.pop("weight_decay", 0.01 if torch and decoupled else 0.0)
    lr = given.pop("lr")
    if decoupled:
        return Chosen("optax.adamw", optax.adamw, lr, {**given, "weight_decay": decay})
    return Chosen("optax.adam", optax.adam, lr, given, decay)


def _other(name: str, given: dict[str, Any]) -> Chosen:
    if not given.get("momentum") and given.pop("nesterov", False):
        raise refuse(
            "optimizer.params.nesterov is true without momentum", "Nesterov's is a kind of momentum.",
            "Write the momentum, or drop nesterov.")  # fmt: skip
    if not given.get("momentum", True):
        given.pop("momentum")
    written, function, is_l2 = _FORMS[name]
    decay = given.pop("weight_decay") if is_l2 else 0.0
    return Chosen(written, function, given.pop("lr"), given, decay)


# Name: what it is in Python, and whether decay is added to the gradients.
_FORMS: dict[str, tuple[str, Callable[..., Any], bool]] = {
    "lamb": ("jzero.deepspeed.lamb", _transforms.lamb, False),
    "lion": ("optax.lion", optax.lion, False),
    "adagrad": ("jzero.deepspeed.adagrad", _transforms.adagrad, True),
    "sgd": ("optax.sgd", optax.sgd, True),
}
