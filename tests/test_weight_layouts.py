"""Hugging Face's weights in and out: names, transposes, heads and layers by a table, bit for bit."""

import importlib.util
import json
import pathlib
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint import _stored, _stream
from jzero.cli._main import main
from jzero.weights import _moves

ROOT = pathlib.Path(__file__).parents[1]
NUM, DIM, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 3, 8, 4, 2, 2, 12, 11
Tensors = dict[str, np.ndarray]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": INNER, "num_hidden_layers": NUM,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
}  # fmt: skip


def values(shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32, scale: float = 1) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: (scale * rng.normal(size=x)).astype(dtype) for name, x in shapes.items()}


def decoder(
    norms: tuple[str, ...] = ("input", "post_attention"), bias: str = "", head_norms: bool = False,
    tied: bool = False,
) -> dict[str, tuple[int, ...]]:  # fmt: skip
    """The tensors of a decoder of Llama's kind, as transformers saves them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for i in range(NUM):
        layer = f"model.layers.{i}."
        for x, num in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}self_attn.{x}_proj.weight"] = (num * HEAD, DIM)
            if x in bias:
                shapes[f"{layer}self_attn.{x}_proj.bias"] = (num * HEAD,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (DIM, HEADS * HEAD)
        for x in "qk" if head_norms else "":
            shapes[f"{layer}self_attn.{x}_norm.weight"] = (HEAD,)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (INNER, DIM)
        shapes[f"{layer}mlp.down_proj.weight"] = (DIM, INNER)
        shapes |= {f"{layer}{x}_layernorm.weight": (DIM,) for x in norms}
    shapes["model.norm.weight"] = (DIM,)
    return shapes if tied else {**shapes, "lm_head.weight": (VOCAB, DIM)}


def gpt2() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCAB, DIM), "transformer.wpe.weight": (7, DIM)}
    for i in range(NUM):
        sizes = {"attn.c_attn": (DIM, 3 * DIM), "attn.c_proj": (DIM, DIM), "mlp.c_fc": (DIM, 4 * DIM),
                 "mlp.c_proj": (4 * DIM, DIM)}  # fmt: skip
        for x in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{i}.{x}.{kind}": (DIM,) for kind in ("weight", "bias")}
        for x, shape in sizes.items():
            shapes |= {f"transformer.h.{i}.{x}.weight": shape, f"transformer.h.{i}.{x}.bias": shape[1:]}
    return shapes | {f"transformer.ln_f.{kind}": (DIM,) for kind in ("weight", "bias")}


FOUR = ("input", "post_attention", "pre_feedforward", "post_feedforward")
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "llama": ("llama", {"model_type": "llama"}, decoder()),
    "llama tied": ("llama", {"model_type": "llama", "tie_word_embeddings": True}, decoder(tied=True)),
    "qwen2": ("qwen", {"model_type": "qwen2"}, decoder(bias="qkv")),
    "qwen3": ("qwen", {"model_type": "qwen3"}, decoder(head_norms=True)),
    "gemma": ("gemma", {"model_type": "gemma"}, decoder(tied=True)),
    "gemma2": ("gemma", {"model_type": "gemma2"}, decoder(FOUR, tied=True)),
    "gemma3": ("gemma", {"model_type": "gemma3_text"}, decoder(FOUR, head_norms=True, tied=True)),
    "gpt2": ("gpt2", {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": DIM, "n_positions": 7, "n_layer": NUM,
                      "n_head": HEADS}, gpt2()),
}  # fmt: skip


def tree_of(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *path, last = name.split("/")
        at = tree
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return tree


def leaves_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """By Orbax alone, by name."""
    found = jax.tree_util.tree_flatten_with_path(ocp.PyTreeCheckpointer().restore(folder.absolute()))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in found}


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (x.dtype, x.shape), name
        assert actual[name].tobytes() == x.tobytes(), name


def heads_apart(name: str, x: np.ndarray) -> np.ndarray:
    """A leaf as a DenseGeneral has it."""
    if "c_attn" in name:
        return x.reshape(*x.shape[:-1], 3, HEADS, HEAD)
    if "o_proj/kernel" in name or "attn/c_proj/kernel" in name:
        return x.reshape(HEADS, HEAD, DIM)
    if any(f"{key}_proj" in name for key in "qkv"):
        return x.reshape(*x.shape[:-1], -1, HEAD)
    return x


def as_linen(leaves: dict[str, np.ndarray], scanned: bool, heads: bool) -> dict[str, np.ndarray]:
    """The default tree's leaves in another tree of the same model."""
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        x = heads_apart(name, leaf) if heads else leaf
        for stack in ("layers", "h"):
            start = f"params/{stack}/"
            if name.startswith(start):
                number, rest = name.removeprefix(start).split("/", 1)
                if scanned:
                    found.setdefault(f"{start}{rest}", []).append(x)
                else:
                    found[f"params/{stack}_{number}/{rest}"] = x
                break
        else:
            found[name] = x
    return {name: np.stack(x) if isinstance(x, list) else x for name, x in found.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_to_the_bit(family, tmp_path, monkeypatch):
    """Names, shapes and bytes; into the default tree, and into others of the same model."""
    monkeypatch.setattr(_stream, "AT_ONCE", 100)  # so that all is read in several blocks
    layout, config, shapes = FAMILIES[family]
    config = {**SIZES, **config} if layout != "gpt2" else config
    tensors = values(shapes, ml_dtypes.bfloat16 if family == "gemma" else np.float32)
    save_file(tensors, tmp_path / "in.safetensors")
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout=layout, config=config)
    leaves = leaves_of(tmp_path / "ck")
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout=layout, config=config)
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)

    for i, (scanned, heads) in enumerate([(True, True), (True, False), (False, True)]):
        wanted = as_linen(leaves, scanned, heads)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(wanted)["params"])
        ck, out = tmp_path / f"ck{i}", tmp_path / f"out{i}.safetensors"
        jzero.import_weights(tmp_path / "in.safetensors", ck, layout=layout, like=like)
        assert_same(leaves_of(ck), wanted)
        jzero.export_weights(ck, out, layout=layout)
        assert_same(load_file(out), tensors)


def test_kernels_are_what_they_are_called(tmp_path):
    """Independently of any round trip."""
    tensors = values(decoder())
    save_file(tensors, tmp_path / "in.safetensors")
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout="llama", prefix="")
    leaves = leaves_of(tmp_path / "ck")
    for x, path in (("self_attn.q_proj", "self_attn/q_proj"), ("mlp.down_proj", "mlp/down_proj")):
        expected = tensors[f"model.layers.1.{x}.weight"].T
        np.testing.assert_array_equal(leaves[f"layers/1/{path}/kernel"], expected)
    np.testing.assert_array_equal(leaves["lm_head/kernel"], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(leaves["embed_tokens/embedding"], tensors["model.embed_tokens.weight"])
    save_file(tensors := values(gpt2()), tmp_path / "in.safetensors")
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "gpt2", layout="gpt2", prefix="")
    expected = tensors["transformer.h.2.attn.c_attn.weight"]
    np.testing.assert_array_equal(leaves_of(tmp_path / "gpt2")["h/2/attn/c_attn/kernel"], expected)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        linear = {"use_bias": False, "rngs": rngs}
        self.self_attn = nnx.Module()
        for x, num in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            setattr(self.self_attn, f"{x}_proj", nnx.Linear(DIM, num * HEAD, **linear))
        self.self_attn.o_proj = nnx.Linear(HEADS * HEAD, DIM, **linear)
        self.mlp = nnx.Module()
        self.mlp.gate_proj, self.mlp.up_proj = (nnx.Linear(DIM, INNER, **linear) for _ in range(2))
        self.mlp.down_proj = nnx.Linear(INNER, DIM, **linear)
        self.input_layernorm, self.post_attention_layernorm = (nnx.RMSNorm(DIM, rngs=rngs) for _ in range(2))


class Model(nnx.Module):
    def __init__(self, stacked: bool, rngs: nnx.Rngs):
        self.embed_tokens = nnx.Embed(VOCAB, DIM, rngs=rngs)
        if stacked:
            self.layers = nnx.vmap(Block, axis_size=NUM)(rngs.fork(split=NUM))
        else:
            self.layers = nnx.List([Block(rngs) for _ in range(NUM)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.lm_head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)


@pytest.mark.parametrize("stacked", [False, True])
def test_nnx(stacked, tmp_path):
    """Into the state of a module, whose leaves are Variables."""
    like = nnx.state(nnx.eval_shape(lambda: Model(stacked, nnx.Rngs(0))), nnx.Param)
    save_file(tensors := values(decoder()), tmp_path / "in.safetensors")
    num = jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout="llama", like=like)
    assert num == len(jax.tree.leaves(like))
    names = _stored.find("test", tmp_path / "ck").leaves
    assert ("params/layers/2/self_attn/q_proj/kernel/value" in names) != stacked
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "ck", {"params": like})["params"]
    expected = tensors["model.layers.2.mlp.up_proj.weight"].T
    kernel = restored["layers"]["mlp"]["up_proj"]["kernel"][...][2] if stacked else (
        restored["layers"][2]["mlp"]["up_proj"]["kernel"][...])  # fmt: skip
    np.testing.assert_array_equal(kernel, expected)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout="llama")
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)
