# SPDX-License-Identifier: Apache-2.0
"""Layouts of families of models: Hugging Face's tensors, and leaves of the same names in a tree of Flax.

Paths are Hugging Face's with `/` for `.`; a Linear's weight is a `kernel`, an Embedding's an `embedding`,
that of a norm a `scale`. Where heads have dims of their own, as in a DenseGeneral, the leaf's shape says so.
"""

from __future__ import annotations

import dataclasses
import os
import runpy
from collections.abc import Iterator
from typing import Any

from jzero import _json
from jzero._errors import OptionError, message
from jzero._json import Malformed, Maybe
from jzero.weights._layout import WeightLayout, WeightRule

_T, _L = "model.layers.{i}.", "[model/]layers/{i}/"
_A = f"{_L}self_attn|attn/"
_INTO, _OUT, _LINEAR = "(h k) d -> d h k", "d (h k) -> h k d", "b a -> a b"


def _decoder() -> Iterator[WeightRule]:
    """Decoders like Llama's; what only some of them have is optional."""
    yield WeightRule("model.embed_tokens.weight", "[model/]embed_tokens/embedding")
    for x in "qkv":
        yield WeightRule(f"{_T}self_attn.{x}_proj.weight", f"{_A}{x}_proj/kernel", _INTO)
        yield WeightRule(f"{_T}self_attn.{x}_proj.bias", f"{_A}{x}_proj/bias", "(h k) -> h k", True)
    yield WeightRule(f"{_T}self_attn.o_proj.weight", f"{_A}o_proj/kernel", _OUT)
    yield WeightRule(f"{_T}self_attn.o_proj.bias", f"{_A}o_proj/bias", optional=True)
    for x in ("gate", "up", "down"):
        yield WeightRule(f"{_T}mlp.{x}_proj.weight", f"{_L}mlp/{x}_proj/kernel", _LINEAR)
        yield WeightRule(f"{_T}mlp.{x}_proj.bias", f"{_L}mlp/{x}_proj/bias", optional=True)
    for x in ("input", "post_attention"):
        yield WeightRule(f"{_T}{x}_layernorm.weight", f"{_L}{x}_layernorm/scale|weight")
    yield WeightRule("model.norm.weight", "[model/]norm/scale|weight")
    yield WeightRule("lm_head.weight", "lm_head/kernel", _LINEAR, True, "model.embed_tokens.weight")
    # Fused leaves: queries, keys and values concatenated; gate and up as two halves.
    qkv, halves = (
        [f"{_T}self_attn.{x}_proj" for x in "qkv"],
        [f"{_T}mlp.{x}_proj" for x in ("gate", "up")],
    )
    for names, leaf, kernel, bias in (
        (qkv, f"{_A}qkv_proj", _INTO, "(h k) -> h k"),
        (halves, f"{_L}mlp/gate_up_proj", "b a -> a (n b)", "b -> (n b)"),
    ):
        yield WeightRule(tuple(f"{x}.weight" for x in names), f"{leaf}/kernel", kernel, True)
        yield WeightRule(tuple(f"{x}.bias" for x in names), f"{leaf}/bias", bias, True)


def _head_norms() -> Iterator[WeightRule]:
    for x in "qk":
        yield WeightRule(
            f"{_T}self_attn.{x}_norm.weight", f"{_A}{x}_norm/scale|weight", optional=True
        )  # fmt: skip


def _feedforward_norms() -> Iterator[WeightRule]:
    """Norms of Gemma 2 and 3."""
    for x in ("pre", "post"):
        name = f"{x}_feedforward_layernorm"
        yield WeightRule(f"{_T}{name}.weight", f"{_L}{name}/scale|weight", optional=True)


def _gpt2() -> Iterator[WeightRule]:
    """GPT-2's Conv1D has kernels as Flax has them."""
    t, path = "transformer.h.{i}.", "[transformer/]h/{i}/"
    for x in ("wte", "wpe"):
        yield WeightRule(f"transformer.{x}.weight", f"[transformer/]{x}/embedding")
    for x in ("ln_1", "ln_2"):
        yield WeightRule(f"{t}{x}.weight", f"{path}{x}/scale|weight")
        yield WeightRule(f"{t}{x}.bias", f"{path}{x}/bias")
    yield WeightRule(f"{t}attn.c_attn.weight", f"{path}attn/c_attn/kernel", "d (n h k) -> d n h k")
    yield WeightRule(f"{t}attn.c_attn.bias", f"{path}attn/c_attn/bias", "(n h k) -> n h k")
    yield WeightRule(f"{t}attn.c_proj.weight", f"{path}attn/c_proj/kernel", "(h k) d -> h k d")
    yield WeightRule(f"{t}attn.c_proj.bias", f"{path}attn/c_proj/bias")
    for x in ("c_fc", "c_proj"):
        yield WeightRule(f"{t}mlp.{x}.weight", f"{path}mlp/{x}/kernel")
        yield WeightRule(f"{t}mlp.{x}.bias", f"{path}mlp/{x}/bias")
    yield WeightRule("transformer.ln_f.weight", "[transformer/]ln_f/scale|weight")
    yield WeightRule("transformer.ln_f.bias", "[transformer/]ln_f/bias")
    yield WeightRule("lm_head.weight", "lm_head/kernel", _LINEAR, True, "transformer.wte.weight")
    # Or separate leaves for queries, keys and values.
    kernels, biases = (
        tuple(f"{path}attn/{x}_proj/{kind}" for x in "qkv") for kind in ("kernel", "bias")
    )
    yield WeightRule(f"{t}attn.c_attn.weight", kernels, "d (n h k) -> d h k", True)
    yield WeightRule(f"{t}attn.c_attn.bias", biases, "(n h k) -> h k", True)


_ROTARY = (f"{_T}self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")
LAYOUTS = {
    "llama": WeightLayout("llama", (*_decoder(),), "model.", _ROTARY),  # and Mistral
    "qwen": WeightLayout("qwen", (*_decoder(), *_head_norms()), "model.", _ROTARY),  # Qwen2 and Qwen3
    "gemma": WeightLayout(
        "gemma", (*_decoder(), *_head_norms(), *_feedforward_norms()), "model.", _ROTARY
    ),
    "gpt2": WeightLayout(
        "gpt2", (*_gpt2(),), "transformer.",
        ("transformer.h.{i}.attn.bias", "transformer.h.{i}.attn.masked_bias"),
    ),
}  # fmt: skip


def layout_or_none(who: str, given: Any, **needed_for: Any) -> WeightLayout | None:
    """The layout for a name, a file (`table.py:NAME`, `table.json`) or a layout; None for None."""
    if given is None:
        if any(option is not None for option in needed_for.values()):
            raise OptionError(message(
                who, f"{' or '.join(needed_for)} is given without a layout", "They say what a layout makes.",
                f"Add layout, one of {', '.join(LAYOUTS)}."))  # fmt: skip
        return None
    given = found = os.fspath(given) if isinstance(given, os.PathLike) else given
    if isinstance(given, str) and (found := LAYOUTS.get(given)) is None:
        file, _, name = given.rpartition(":")
        try:
            if given.endswith(".json"):
                found = _from_json(given)
            elif file.endswith(".py"):
                found = runpy.run_path(file).get(name)
        except (Exception, SystemExit) as error:
            said = "; ".join(error.args) if isinstance(error, Malformed) else (
                f"{type(error).__name__}: {error}")  # fmt: skip
            raise _refused(who, f"{given!r}: {said}") from error
    if not isinstance(found, WeightLayout):
        raise _refused(who, repr(given)[:200])
    found.check(who)
    return found


_NAMES = (str, [str])
_RULE = {"tensors": _NAMES, "leaves": _NAMES, "optional": Maybe(bool)}
_TABLE = {"rules": [_RULE], "ignored": Maybe([str])}


def _from_json(path: str) -> WeightLayout:
    """The layout of `{"extends": "llama", "rules": [{"tensors": "a.weight", "leaves": "a/scale"}]}`."""
    entries = _json.load(path, _json.MAX_BYTES)
    if bad := _json.check(entries, _TABLE):
        raise Malformed(*bad)
    if (name := entries.pop("extends", None)) not in (None, *LAYOUTS):
        raise Malformed(f"extends is {_json.shown(name)}, which is no layout")
    own = WeightLayout(path, ()) if name is None else LAYOUTS[name]
    rules: list[dict[str, Any]] = [
        {key: tuple(x) if isinstance(x, list) else x for key, x in rule.items()}
        for rule in entries.pop("rules")
    ]
    ignored = entries.pop("ignored", None) or []
    made = own.extended(*(WeightRule(**rule) for rule in rules), **entries)
    return dataclasses.replace(made, ignored=(*made.ignored, *ignored))


def _refused(who: str, found: str) -> OptionError:
    return OptionError(message(
        who, f"layout={found}", "It is a WeightLayout, the name of one, or a file with one.",
        f"There are {', '.join(LAYOUTS)}; or write table.py:NAME or table.json."))  # fmt: skip
