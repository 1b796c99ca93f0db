# SPDX-License-Identifier: Apache-2.0
"""Shapes of a model's parameters, from a config.json of Hugging Face's transformers.

Exact, or refused: each family below is written from its class in transformers, and `tests/test_hf_config.py`
holds the counts against those of published checkpoints. Tied weights count once, and buffers not at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jzero import _json
from jzero._errors import OptionError, message, named

ParamShapes = dict[str, tuple[int, ...]]
_MAX_SIZE = 10**9  # of a dim; products of a few stay printable
_MAX_LAYERS = 10**5
_MAX_BYTES = 2**24
_ENTRY = "Correct it, or pass the number of parameters instead, '7.5B'."


class _Bad(Exception):
    """A finding about a configuration; its arguments are those of a message."""


class ModelPart(NamedTuple):
    """Equal parts of a model: its layers, or a part of another kind."""

    name: str  # as transformers names it
    num: int
    shapes: ParamShapes  # of one part's parameters, by name; the experts of a layer are one array

    @property
    def num_params(self) -> int:
        """Parameters of one."""
        return sum(map(math.prod, self.shapes.values()))


class Model(NamedTuple):
    """A model as its configuration describes it."""

    model_type: str  # the name of its family
    width: int  # elements of a layer's input for a token
    parts: tuple[ModelPart, ...]  # layers, embeddings, heads
    head_dim: int | None = None  # the size of a head of attention, where it is known

    @property
    def num_params(self) -> int:
        return sum(part.num * part.num_params for part in self.parts)

    @property
    def layers(self) -> tuple[ModelPart, ...]:
        return tuple(part for part in self.parts if part.name.endswith("layers"))

    @property
    def num_layers(self) -> int:
        return sum(part.num for part in self.layers)

    @property
    def layer_params(self) -> int:
        """Parameters of the largest layer."""
        return max(part.num_params for part in self.layers)

    @property
    def largest_leaf(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of the parameter with the most elements."""
        leaves = [
            (f"{p.name}.{name}".lstrip("."), x) for p in self.parts for name, x in p.shapes.items()
        ]
        return max(leaves, key=lambda leaf: math.prod(leaf[1]))

    def to_dict(self) -> dict[str, Any]:
        name, shape = self.largest_leaf
        return {
            "model_type": self.model_type,
            "layers": self.num_layers,
            "width": self.width,
            "layer_params": self.layer_params,
            "largest_leaf": [name, list(shape)],
        }


def read_model(config: Any, who: str = "estimate", edit: str = _ENTRY) -> Model:
    """The model of a configuration: a dict, or the path of its JSON file.

    Refuses an unknown family and invalid entries; `edit` says what to do about an entry.
    """
    try:
        return _model(_read(config))
    except _Bad as error:
        found, rule, own, *rest = error.args
        raise OptionError(
            message(who, found, rule, edit if own is _ENTRY else own, *rest)
        ) from None


def _model(entries: Mapping[str, Any]) -> Model:
    if entries.get("text_config") is not None:
        raise _refused(
            "model_type", entries.get("model_type"), "Several models are in it.",
            "Pass its text_config, a configuration, too: what it leaves out is its class's.")  # fmt: skip
    family = _Entries(entries).family()
    found = _Entries({**_DEFAULTS.get(family, {}), **entries})
    if entries.get("quantization_config") is not None:
        raise _refused(
            "quantization_config", entries["quantization_config"],
            "Parameters of a quantised model are packed, and are not trained in that form.",
            "Drop it for the model that it was made from.")  # fmt: skip
    return Model(family, *_FAMILIES[family].read(found), found.head_dim)


def _read(config: Any) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        raise _Bad(
            f"a configuration is {_json.shown(config)}", "It is a dict, or the path of a JSON file.",
            "Write 'config.json'.")  # fmt: skip
    text, path = named(os.fspath(config)), Path(os.path.expanduser(config))
    rule, edit = "It is the path of a model's config.json.", "Correct the path."
    if "://" in text:
        rule, edit = "It is a file, and nothing is fetched.", "Download the file, and name it."
    elif path.is_dir():
        edit = f"Write {os.fspath(path / 'config.json')!r}."
    elif not path.exists() and text.count("/") == 1 and not text.endswith(".json"):
        edit = "Nothing is fetched: download config.json of that repository, and name the file."
    try:
        value = _json.load(path, _MAX_BYTES)
    except OSError as error:
        raise _Bad(
            f"configuration {text!r} cannot be read: {error.strerror}", rule, edit) from None  # fmt: skip
    except _json.Malformed as error:
        raise _Bad(
            [f"configuration {text!r}: {found}" for found in error.args], "A configuration is a JSON file.",
            "Correct it.", "entries", 20) from None  # fmt: skip
    if not isinstance(value, dict):
        raise _Bad(
            f"configuration {text!r} has {_json.shown(value)}", "A configuration is one JSON object.",
            edit if path.name != "config.json" else "Get it again.")  # fmt: skip
    return value


def _refused(key: str, value: Any, rule: str, edit: str = _ENTRY) -> _Bad:
    return _Bad(f"{key} of config is {_json.shown(value)}", rule, edit)


class _Entries:
    """A configuration's entries, checked as they are read; null counts as missing."""

    def __init__(self, entries: Mapping[str, Any]):
        self._entries = {key: x for key, x in entries.items() if x is not None}
        self._null = entries.keys() - self._entries.keys()
        self.head_dim: int | None = None  # as the family's reader finds it

    def family(self) -> str:
        """The family by `model_type`, or else by the class."""
        kind, known = self._entries.get("model_type"), ", ".join(_FAMILIES)
        if kind is None and (classes := self.classes()):
            kind = next((name for name, f in _FAMILIES.items() if classes <= {*f.classes}), None)
        if not isinstance(kind, str) or kind not in _FAMILIES:
            raise _refused("model_type", kind, f"There are {known}.")
        of_it = _FAMILIES[kind].classes
        if unknown := self.classes() - {*of_it}:
            raise _refused(
                "architectures", sorted(unknown), f"Of {kind} there are {', '.join(of_it)}."
            )
        return kind

    def classes(self) -> set[str]:
        """The class of transformers, if one is given."""
        found = self._entries.get("architectures", [])
        if (
            not isinstance(found, list)
            or len(found) > 1
            or not all(isinstance(x, str) for x in found)
        ):
            raise _refused("architectures", found, "It is a list with the name of one class.")
        return set(found)

    def is_base(self) -> bool:
        """Whether the class is the model without a head."""
        return any(
            name.endswith("Model") and not name.endswith("HeadModel") for name in self.classes()
        )

    def size(
        self, key: str, default: int | None = None, most: int = _MAX_SIZE, least: int = 1
    ) -> int:
        """A whole number; required if it has no default."""
        value = self._entries.get(key, default)
        if value is None:
            raise _Bad(
                f"config has no {key}", "The number of parameters goes by it.", _ENTRY)  # fmt: skip
        if type(value) is not int or not least <= value <= most:
            raise _refused(key, value, f"It is a whole number from {least} to {most}.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.of_kind(key, bool, default, "true or false"))

    def says(self, key: str) -> bool:
        """Whether the entry is there, be it null."""
        return key in self._entries or key in self._null

    def of_kind(self, key: str, kind: type, default: Any, what: str) -> Any:
        value = self._entries.get(key, default)
        if type(value) is not kind:
            raise _refused(key, value, f"It is {what}.")
        return value


_Reading = tuple[int, tuple[ModelPart, ...]]


def _linear(name: str, out: int, into: int, bias: bool = False) -> ParamShapes:
    return {f"{name}.weight": (out, into)} | ({f"{name}.bias": (out,)} if bias else {})


def _conv1d(name: str, into: int, out: int) -> ParamShapes:
    """A linear layer of GPT-2, whose weight is transposed."""
    return {f"{name}.weight": (into, out), f"{name}.bias": (out,)}


def _norms(width: int, *names: str, bias: bool = False) -> ParamShapes:
    kinds = ("weight", "bias") if bias else ("weight",)
    return {f"{name}.{kind}": (width,) for name in names for kind in kinds}


def _attention(
    c: _Entries, d: int, head_dim: int | None, bias: str, head_norms: bool, old: bool = False
) -> ParamShapes:
    """Projections of attention; heads may be wider than their share of the input `d`.

    `bias`: which projections have one: 'none', 'qkv', or 'all' if `attention_bias` says so. `head_dim` is the
    default, None for a head's share of `d`. `old` models (Llama's first) have no num_key_value_heads.
    """
    heads = c.size("num_attention_heads")
    kv_heads = c.size(
        "num_key_value_heads", heads if c.says("num_key_value_heads") or old else None
    )
    if head_dim is None and not c.says("head_dim") and d % heads:
        raise _refused("num_attention_heads", heads, f"Heads divide the width, {d}.")
    if heads % kv_heads:
        raise _refused("num_key_value_heads", kv_heads, f"They divide the heads, {heads}.")
    each = c.head_dim = c.size("head_dim", head_dim or d // heads)
    every = bias == "all" and c.flag("attention_bias", False)
    qkv = every or (bias == "qkv" and c.flag("qkv_bias", True))
    return (
        _linear("q_proj", heads * each, d, qkv)
        | _linear("k_proj", kv_heads * each, d, qkv)
        | _linear("v_proj", kv_heads * each, d, qkv)
        | _linear("o_proj", d, heads * each, every)
        | (_norms(each, "q_norm", "k_norm") if head_norms else {})
    )


def _gated_mlp(d: int, inner: int, bias: bool = False, name: str = "mlp") -> ParamShapes:
    return (
        _linear(f"{name}.gate_proj", inner, d, bias)
        | _linear(f"{name}.up_proj", inner, d, bias)
        | _linear(f"{name}.down_proj", d, inner, bias)
    )


def _experts(num: int, d: int, inner: int) -> ParamShapes:
    shapes = {"gate_proj": (inner, d), "up_proj": (inner, d), "down_proj": (d, inner)}
    router = _linear("mlp.gate", num, d)
    return router | {f"mlp.experts.{name}": (num, *shape) for name, shape in shapes.items()}


def _causal_lm(c: _Entries, d: int, layers: list[ModelPart], tied: bool) -> _Reading:
    vocab = c.size("vocab_size")
    parts = [
        ModelPart("embed_tokens", 1, {"weight": (vocab, d)}),
        *layers,
        ModelPart("norm", 1, {"weight": (d,)}),
    ]
    if not c.flag("tie_word_embeddings", tied) and not c.is_base():
        parts.append(ModelPart("lm_head", 1, {"weight": (vocab, d)}))
    return d, tuple(part for part in parts if part.num)


def _decoder(
    bias: str, tied: bool = False, head_dim: int | None = None, head_norms: bool = False,
    num_norms: int = 2, mlp_bias: bool = False,
) -> Callable[[_Entries], _Reading]:  # fmt: skip
    def read(c: _Entries) -> _Reading:
        d = c.size("hidden_size")
        bias_too = mlp_bias and c.flag("mlp_bias", False)
        shapes = (
            _attention(c, d, head_dim, bias, head_norms, old=mlp_bias)
            | _gated_mlp(d, c.size("intermediate_size"), bias_too)
            | _norms(d, *_NORMS[:num_norms])
        )
        layers = [ModelPart("layers", c.size("num_hidden_layers", most=_MAX_LAYERS), shapes)]
        return _causal_lm(c, d, layers, tied)

    return read


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def _mixtral(c: _Entries) -> _Reading:
    d = c.size("hidden_size")
    shapes = (
        _attention(c, d, None, "none", head_norms=False)
        | _experts(c.size("num_local_experts"), d, c.size("intermediate_size"))
        | _norms(d, *_NORMS[:2])
    )
    layers = [ModelPart("layers", c.size("num_hidden_layers", most=_MAX_LAYERS), shapes)]
    return _causal_lm(c, d, layers, False)


def _qwen_moe(bias: str, head_norms: bool, shared: bool) -> Callable[[_Entries], _Reading]:
    """Layers with experts at regular steps, except those that are listed as dense."""

    def read(c: _Entries) -> _Reading:
        d, num = c.size("hidden_size"), c.size("num_hidden_layers", most=_MAX_LAYERS)
        every = c.size("decoder_sparse_step", 1)
        dense = c.of_kind("mlp_only_layers", list, [], "a list of layers")
        if not all(type(layer) is int for layer in dense):
            raise _refused("mlp_only_layers", dense, "It is a list of layers.")
        listed = {*dense}
        num_sparse = sum(i not in listed for i in range(every - 1, num, every))
        both = _attention(c, d, None, bias, head_norms) | _norms(d, *_NORMS[:2])
        sparse = _experts(c.size("num_experts"), d, c.size("moe_intermediate_size"))
        if shared:
            inner = c.size("shared_expert_intermediate_size")
            sparse |= _gated_mlp(d, inner, name="mlp.shared_expert")
            sparse |= _linear("mlp.shared_expert_gate", 1, d)
        layers = [ModelPart("layers", num_sparse, both | sparse)]
        if num > num_sparse:
            mlp = _gated_mlp(d, c.size("intermediate_size"))
            layers.append(ModelPart("dense layers", num - num_sparse, both | mlp))
        return _causal_lm(c, d, layers, False)

    return read


def _gpt2(c: _Entries) -> _Reading:
    if c.flag("add_cross_attention", False):
        raise _refused("add_cross_attention", True, "Cross-attention of GPT-2 is not counted.")
    d, vocab = c.size("n_embd"), c.size("vocab_size")
    heads = c.size("n_head", 12)
    if c.says("n_head") and d % heads:
        raise _refused("n_head", heads, f"Heads divide the width, {d}.")
    c.head_dim = None if d % heads else d // heads
    inner = c.size("n_inner", 4 * d)
    layer = (
        _norms(d, "ln_1", "ln_2", bias=True)
        | _conv1d("attn.c_attn", d, 3 * d)
        | _conv1d("attn.c_proj", d, d)
        | _conv1d("mlp.c_fc", d, inner)
        | _conv1d("mlp.c_proj", inner, d)
    )
    parts = [
        ModelPart("", 1, {"wte.weight": (vocab, d), "wpe.weight": (c.size("n_positions"), d)}),
        ModelPart("layers", c.size("n_layer", most=_MAX_LAYERS), layer),
        ModelPart("", 1, _norms(d, "ln_f", bias=True)),
    ]
    if not c.flag("tie_word_embeddings", True) and not c.is_base():
        parts.append(ModelPart("lm_head", 1, {"weight": (vocab, d)}))
    return d, tuple(parts)


def _t5(c: _Entries) -> _Reading:
    """Relative positions are a table of the first layer of encoder and decoder; norms have no bias."""
    d, vocab, inner = c.size("d_model"), c.size("vocab_size"), c.size("d_ff")
    heads, each = c.size("num_heads"), c.size("d_kv")
    act = c.of_kind("feed_forward_proj", str, "relu", "a text")
    wide = ("wi_0", "wi_1") if act.startswith("gated-") else ("wi",)
    mlp = {f"{name}.weight": (inner, d) for name in wide} | {"wo.weight": (d, inner)}

    def attention(name: str) -> ParamShapes:
        into = {f"{name}.{x}.weight": (heads * each, d) for x in "qkv"}
        return into | {f"{name}.o.weight": (d, heads * each)} | _norms(d, f"{name}.layer_norm")

    num = c.size("num_layers", most=_MAX_LAYERS)
    ends: ParamShapes = {"final_layer_norm.weight": (d,)}
    ends["relative_attention_bias.weight"] = (c.size("relative_attention_num_buckets", 32), heads)
    feed = mlp | _norms(d, "layer_norm")
    parts = [
        ModelPart("shared", 1, {"weight": (vocab, d)}),
        ModelPart("encoder layers", num, attention("SelfAttention") | feed),
        ModelPart("encoder", 1, ends),
    ]
    if c.classes() != {"T5EncoderModel"}:
        cross = attention("SelfAttention") | attention("EncDecAttention")
        parts += [
            ModelPart(
                "decoder layers", c.size("num_decoder_layers", num, _MAX_LAYERS), cross | feed
            ),
            ModelPart("decoder", 1, ends),
        ]
    if not c.flag("tie_word_embeddings", True) and not c.is_base():
        parts.append(ModelPart("lm_head", 1, {"weight": (vocab, d)}))
    return d, tuple(parts)


def _vit(c: _Entries) -> _Reading:
    """The class without a head has a pooler, as transformers makes it."""
    d, inner = c.size("hidden_size"), c.size("intermediate_size")
    image, patch, channels = (
        c.size("image_size", 224),
        c.size("patch_size", 16),
        c.size("num_channels", 3),
    )
    if c.says("num_attention_heads") and d % (heads := c.size("num_attention_heads", 12)):
        raise _refused("num_attention_heads", heads, f"Heads divide the width, {d}.")
    if patch > image:
        raise _refused("patch_size", patch, f"A patch is no larger than the image, {image}.")
    bias = c.flag("qkv_bias", True)
    layer = _norms(d, "layernorm_before", "layernorm_after", bias=True)
    for name in ("query", "key", "value"):
        layer |= _linear(f"attention.{name}", d, d, bias)
    layer |= _linear("attention.output", d, d, bias=True)
    layer |= _linear("intermediate", inner, d, bias=True) | _linear("output", d, inner, bias=True)
    first: ParamShapes = {
        "cls_token": (1, 1, d),
        "position_embeddings": (1, (image // patch) ** 2 + 1, d),
        "patch_embeddings.weight": (d, channels, patch, patch),
        "patch_embeddings.bias": (d,),
    }
    parts = [
        ModelPart("embeddings", 1, first),
        ModelPart("layers", c.size("num_hidden_layers", most=_MAX_LAYERS), layer),
        ModelPart("", 1, _norms(d, "layernorm", bias=True)),
    ]
    if c.is_base():
        pooled = c.size("pooler_output_size", d)
        parts.append(ModelPart("pooler", 1, _linear("dense", pooled, d, bias=True)))
    else:  # Two classes by default, as in transformers.
        names = c.of_kind("id2label", dict, {}, "an object with the names of classes")
        if classes := len(names) or c.size("num_labels", 2, least=0):
            parts.append(ModelPart("classifier", 1, {"weight": (classes, d), "bias": (classes,)}))
    return d, tuple(parts)


# Defaults of transformers' classes, which text_configs of larger models rely on.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32},
    "mistral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen2": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32},
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4},
}  # fmt: skip


class _Family(NamedTuple):
    """Models that differ only in sizes: the classes of transformers, and the reader of a configuration."""

    classes: tuple[str, ...]
    read: Callable[[_Entries], _Reading]


def _lm(prefix: str, read: Callable[[_Entries], _Reading], base: str = "Model") -> _Family:
    return _Family((f"{prefix}ForCausalLM", f"{prefix}{base}"), read)


_FAMILIES = {
    "llama": _lm("Llama", _decoder("all", mlp_bias=True)),
    "mistral": _lm("Mistral", _decoder("none")),
    "qwen2": _lm("Qwen2", _decoder("qkv")),
    "qwen3": _lm("Qwen3", _decoder("all", head_dim=128, head_norms=True)),
    "gemma": _lm("Gemma", _decoder("all", True, 256)),
    "gemma2": _lm("Gemma2", _decoder("all", True, 256, num_norms=4)),
    "gemma3_text": _lm("Gemma3", _decoder("all", True, 256, True, num_norms=4), "TextModel"),
    "mixtral": _lm("Mixtral", _mixtral),
    "qwen2_moe": _lm("Qwen2Moe", _qwen_moe("qkv", head_norms=False, shared=True)),
    "qwen3_moe": _lm("Qwen3Moe", _qwen_moe("all", head_norms=True, shared=False)),
    "gpt2": _Family(("GPT2LMHeadModel", "GPT2Model"), _gpt2),
    "t5": _Family(("T5ForConditionalGeneration", "T5Model", "T5EncoderModel"), _t5),
    "vit": _Family(("ViTForImageClassification", "ViTModel"), _vit),
}
