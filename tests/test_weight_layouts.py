"""Hugging Face's weights in and out: names, transposes, heads and layers by a table, bit for bit."""

import importlib.util
import itertools
import json
import os
import pathlib
import re
import types
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint import _stored, _stream
from jzero.cli._main import main
from jzero.weights import _axes, _sources

ROOT = pathlib.Path(__file__).parents[1]
NUM, DIM, HEADS, KV_HEADS, HEAD, INNER, VOCAB = 3, 8, 4, 2, 2, 12, 11
Tensors = dict[str, np.ndarray]
SIZES = {
    "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": INNER, "num_hidden_layers": NUM,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD,
}  # fmt: skip


def values(
    shapes: dict[str, tuple[int, ...]], dtype: Any = np.float32, scale: float = 1
) -> Tensors:
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
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (VOCAB, DIM),
        "transformer.wpe.weight": (7, DIM),
    }
    for i in range(NUM):
        sizes = {"attn.c_attn": (DIM, 3 * DIM), "attn.c_proj": (DIM, DIM), "mlp.c_fc": (DIM, 4 * DIM),
                 "mlp.c_proj": (4 * DIM, DIM)}  # fmt: skip
        for x in ("ln_1", "ln_2"):
            shapes |= {f"transformer.h.{i}.{x}.{kind}": (DIM,) for kind in ("weight", "bias")}
        for x, shape in sizes.items():
            shapes |= {
                f"transformer.h.{i}.{x}.weight": shape,
                f"transformer.h.{i}.{x}.bias": shape[1:],
            }
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
    "gpt2": ("gpt2", {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": DIM, "n_positions": 7,
                      "n_layer": NUM, "n_head": HEADS}, gpt2()),
}  # fmt: skip


def tree_of(leaves: dict[str, Any]) -> dict[str, Any]:
    return flax.traverse_util.unflatten_dict(leaves, sep="/")


def leaves_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """By Orbax alone, by name."""
    found = jax.tree_util.tree_flatten_with_path(
        ocp.PyTreeCheckpointer().restore(folder.absolute())
    )[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in found
    }


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


@pytest.mark.slow(but=["llama"])
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
    jzero.export_weights(
        tmp_path / "ck", tmp_path / "out.safetensors", layout=layout, config=config
    )
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)

    for i, (scanned, heads) in enumerate([(True, True), (True, False), (False, True)]):
        wanted = as_linen(leaves, scanned, heads)
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree_of(wanted)["params"]
        )
        ck, out = tmp_path / f"ck{i}", tmp_path / f"out{i}.safetensors"
        jzero.import_weights(tmp_path / "in.safetensors", ck, layout=layout, like=like)
        assert_same(leaves_of(ck), wanted)
        jzero.export_weights(ck, out, layout=layout)
        assert_same(load_file(out), tensors)


class Model(nnx.Module):
    def __init__(self, stacked: bool, rngs: nnx.Rngs):
        def layer(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(DIM, INNER, use_bias=False, rngs=rngs)

        if stacked:
            self.layers: Any = nnx.vmap(layer, axis_size=NUM)(rngs.split(NUM))
        else:
            self.layers = nnx.List([layer(rngs) for _ in range(NUM)])


@pytest.mark.parametrize("stacked", [False, True])
def test_nnx(stacked, tmp_path):
    """Into the state of a module, whose leaves are Variables."""
    like = nnx.state(nnx.eval_shape(lambda: Model(stacked, nnx.Rngs(0))), nnx.Param)
    rule = jzero.WeightRule("layers.{i}.weight", "layers/{i}/kernel", "b a -> a b")
    options: Any = {"layout": jzero.WeightLayout("t", (rule,))}
    tensors = values({f"layers.{i}.weight": (INNER, DIM) for i in range(NUM)})
    save_file(tensors, tmp_path / "in.safetensors")
    num = jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", like=like, **options)
    assert num == len(jax.tree.leaves(like))
    names = _stored.find("test", tmp_path / "ck").leaves
    assert ("params/layers/2/kernel/value" in names) != stacked
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "ck", {"params": like})["params"]["layers"]
    kernel = found["kernel"][...][2] if stacked else found[2]["kernel"][...]
    np.testing.assert_array_equal(kernel, tensors["layers.2.weight"].T)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", **options)
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)


def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * (x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))


def layer_norm(x: np.ndarray, t: Tensors, name: str) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * t[f"{name}.weight"] + t[f"{name}.bias"]


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal, of [heads, length, dim]."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(q.shape[-2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def llama_logits(t: Tensors, ids: np.ndarray) -> np.ndarray:
    """By modeling_llama.py, in float64: a Linear is x @ weight.T, rotate_half is [-second, first]."""
    t = {name: x.astype(np.float64) for name, x in t.items()}
    x, length = t["model.embed_tokens.weight"][ids], len(ids)
    inverse = 1 / 10000 ** (np.arange(0, HEAD, 2) / HEAD)
    angles = np.concatenate([np.outer(np.arange(length), inverse)] * 2, -1)

    def rope(x: np.ndarray) -> np.ndarray:
        rotated = np.concatenate([-x[..., HEAD // 2 :], x[..., : HEAD // 2]], -1)
        return x * np.cos(angles) + rotated * np.sin(angles)

    for i in range(NUM):
        p = f"model.layers.{i}."
        h = rms(x, t[f"{p}input_layernorm.weight"])
        q, k, v = ((h @ t[f"{p}self_attn.{n}_proj.weight"].T).reshape(length, -1, HEAD).swapaxes(0, 1)
                   for n in "qkv")  # fmt: skip
        k, v = (np.repeat(y, HEADS // KV_HEADS, 0) for y in (rope(k), v))  # repeat_kv
        mixed = attention(rope(q), k, v).swapaxes(0, 1).reshape(length, -1)
        x = x + mixed @ t[f"{p}self_attn.o_proj.weight"].T
        h = rms(x, t[f"{p}post_attention_layernorm.weight"])
        gate = h @ t[f"{p}mlp.gate_proj.weight"].T
        up = h @ t[f"{p}mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ t[f"{p}mlp.down_proj.weight"].T
    head = t.get("lm_head.weight", t["model.embed_tokens.weight"])
    return rms(x, t["model.norm.weight"]) @ head.T


def gpt2_logits(t: Tensors, ids: np.ndarray) -> np.ndarray:
    """By modeling_gpt2.py, in float64: a Conv1D is x @ weight + bias; the head is tied."""
    t = {name.removeprefix("transformer."): x.astype(np.float64) for name, x in t.items()}
    x, length = t["wte.weight"][ids] + t["wpe.weight"][: len(ids)], len(ids)

    def conv1d(x: np.ndarray, name: str) -> np.ndarray:
        return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

    for i in range(NUM):
        p = f"h.{i}."
        parts = np.split(conv1d(layer_norm(x, t, f"{p}ln_1"), f"{p}attn.c_attn"), 3, -1)
        q, k, v = (y.reshape(length, HEADS, HEAD).swapaxes(0, 1) for y in parts)
        x = x + conv1d(attention(q, k, v).swapaxes(0, 1).reshape(length, -1), f"{p}attn.c_proj")
        h = conv1d(layer_norm(x, t, f"{p}ln_2"), f"{p}mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))  # gelu_new
        x = x + conv1d(h, f"{p}mlp.c_proj")
    return layer_norm(x, t, "ln_f") @ t["wte.weight"].T


def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("llama", ROOT / "examples" / "finetune_llama.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def imported(model: nn.Module, tensors: Tensors, layout: str, folder: pathlib.Path) -> Any:
    """The model's parameters, from a file."""
    save_file(tensors, folder / "in.safetensors")
    with jax.numpy_rank_promotion("allow"):
        like = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    jzero.import_weights(folder / "in.safetensors", folder / "ck", layout=layout, like=like)
    return ocp.PyTreeCheckpointer().restore(folder / "ck", {"params": like})["params"]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_llama_computes_what_hugging_face_defines(tied, tmp_path):
    """Grouped heads, layers in one leaf, heads in dims of their own."""
    config = {**SIZES, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": tied}
    model, tensors = example().Llama(config), values(decoder(tied=tied), scale=0.5)
    params = imported(model, tensors, "llama", tmp_path)
    ids = np.random.default_rng(1).integers(VOCAB, size=9)
    with jax.numpy_rank_promotion("allow"):
        actual = model.apply({"params": params}, ids[None])[0]
    np.testing.assert_allclose(actual, llama_logits(tensors, ids), rtol=1e-4, atol=1e-4)


class GPT2(nn.Module):
    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        wte = nn.Embed(VOCAB, DIM, name="wte")
        x = wte(ids) + nn.Embed(7, DIM, name="wpe")(jnp.arange(ids.shape[1]))
        for i in range(NUM):
            x = GPT2Layer(name=f"h_{i}")(x)
        return wte.attend(nn.LayerNorm(1e-5, name="ln_f")(x))


class GPT2Attention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (nn.DenseGeneral((HEADS, HEAD), name=f"{y}_proj")(x) for y in "qkv")
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return nn.Dense(DIM, name="c_proj")(mixed.reshape(x.shape))


class GPT2MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(DIM, name="c_proj")(nn.gelu(nn.Dense(4 * DIM, name="c_fc")(x)))


class GPT2Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + GPT2Attention(name="attn")(nn.LayerNorm(1e-5, name="ln_1")(x))
        return x + GPT2MLP(name="mlp")(nn.LayerNorm(1e-5, name="ln_2")(x))


def test_gpt2_computes_what_hugging_face_defines(tmp_path):
    """The fused projection in three leaves, and back; names without `transformer.`, buffers left out."""
    tensors = values(gpt2(), scale=0.5)
    base = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    masks = {f"h.{i}.attn.bias": np.tri(7, dtype=np.float32)[None, None] for i in range(NUM)}
    params = imported(GPT2(), base | masks, "gpt2", tmp_path)
    ids = np.random.default_rng(1).integers(VOCAB, size=7)
    with jax.numpy_rank_promotion("allow"):
        actual = GPT2().apply({"params": params}, ids[None])[0]
    np.testing.assert_allclose(actual, gpt2_logits(tensors, ids), rtol=1e-4, atol=1e-4)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout="gpt2")
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)


# A user's own tables.


def shapes_of(leaves: dict[str, tuple[int, ...]]) -> Any:
    return tree_of(
        {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in leaves.items()}
    )


def test_own_rules_for_another_tree(tmp_path, monkeypatch):
    """Keys and values in one leaf, and heads between the dims of a matrix, as Google's own Gemma has them."""
    monkeypatch.setattr(_stream, "AT_ONCE", 100)
    names = tuple(f"layers.{{i}}.{x}.weight" for x in "kv")
    rule = jzero.WeightRule(names, "layer_{i}/attn/kv_einsum/w", "(h k) d -> n h d k")
    layout = jzero.WeightLayout("google", (rule,))
    tensors = values(
        {f"layers.{i}.{x}.weight": (KV_HEADS * HEAD, DIM) for i in range(NUM) for x in "kv"}
    )
    save_file(tensors, tmp_path / "in.safetensors")
    like = shapes_of({f"layer_{i}/attn/kv_einsum/w": (2, KV_HEADS, DIM, HEAD) for i in range(NUM)})
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout=layout, like=like)
    expected = tensors["layers.1.v.weight"].reshape(KV_HEADS, HEAD, DIM).transpose(0, 2, 1)
    found = leaves_of(tmp_path / "ck")["params/layer_1/attn/kv_einsum/w"]
    np.testing.assert_array_equal(found[1], expected)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout=layout)
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)


@pytest.mark.parametrize("heads", [(HEADS + 2 * KV_HEADS, HEAD), ((HEADS + 2 * KV_HEADS) * HEAD,)])
def test_queries_keys_and_wholein_one_leaf(heads, tmp_path):
    """Of grouped heads, with biases: which columns are whose, only a config says."""
    tensors = values(decoder(bias="qkv"))
    shapes = {name: shape for name, shape in as_default(decoder()).items()
              if not any(f"/{x}_proj" in name for x in ("q", "k", "v", "gate", "up"))}  # fmt: skip
    for i in range(NUM):
        shapes[f"layers/{i}/self_attn/qkv_proj/kernel"] = (DIM, *heads)
        shapes[f"layers/{i}/self_attn/qkv_proj/bias"] = heads
        shapes[f"layers/{i}/mlp/gate_up_proj/kernel"] = (DIM, 2 * INNER)
    save_file(tensors, tmp_path / "in.safetensors")
    jzero.import_weights(
        tmp_path / "in.safetensors", tmp_path / "ck", layout="qwen", like=shapes_of(shapes)
    )
    leaf = leaves_of(tmp_path / "ck")["params/layers/1/self_attn/qkv_proj/kernel"]
    parts = [tensors[f"model.layers.1.self_attn.{x}_proj.weight"].T for x in "qkv"]
    np.testing.assert_array_equal(leaf.reshape(DIM, -1), np.concatenate(parts, 1))
    with pytest.raises(jzero.CheckpointError, match="how many each has is not known: pass config"):
        jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout="qwen")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SIZES}))
    main(["export", str(tmp_path / "ck"), str(tmp_path / "out.safetensors"), "--layout", "qwen",
          "--config", str(tmp_path / "config.json")])  # fmt: skip
    assert_same(load_file(tmp_path / "out.safetensors"), tensors)


def as_default(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The default tree of a decoder."""
    found = {}
    for name, shape in shapes.items():
        path = name.removeprefix("model.").removesuffix(".weight").replace(".", "/")
        kind = "embedding" if "embed" in name else "scale" if "norm" in name else "kernel"
        found[f"{path}/{kind}"] = shape[::-1] if kind == "kernel" else shape
    return found


@pytest.mark.slow
def test_tables_in_files(tmp_path, monkeypatch):
    """Python and JSON, by the command; with a user's function that has the shapes."""
    monkeypatch.chdir(tmp_path)
    rule = {"tensors": "a.weight", "leaves": "last/kernel", "axes": "b a -> a b"}
    (tmp_path / "table.json").write_text(json.dumps({"rules": [rule]}))
    made = f"jzero.WeightLayout('t', (jzero.WeightRule(**{rule}),))"
    (tmp_path / "table.py").write_text(f"import jzero\nMINE = {made}\n")
    (tmp_path / "shapes_for_layouts.py").write_text(
        "import jax.numpy as jnp\n"
        "def shapes(): return {'last': {'kernel': jnp.zeros((3, 2), jnp.bfloat16)}}\n"
    )
    save_file(tensors := values({"a.weight": (2, 3)}), tmp_path / "in.safetensors")
    for i, layout in enumerate(["table.py:MINE", "table.json"]):
        like = ["--like", "shapes_for_layouts:shapes"]
        main(["import", "in.safetensors", f"ck{i}", "--layout", layout, *like])
        assert leaves_of(tmp_path / f"ck{i}")["params/last/kernel"].dtype == jnp.bfloat16
        main(["export", f"ck{i}", f"out{i}.safetensors", "--layout", layout, "--dtype", "bf16"])
        expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
        assert_same(load_file(tmp_path / f"out{i}.safetensors"), expected)


# Refusals, each before anything is written.


def refused(tmp_path, tensors: Tensors, **options: Any) -> str:
    save_file(tensors, tmp_path / "in.safetensors")
    options = {"layout": "llama", **options}
    with pytest.raises(jzero.JzeroError) as caught:
        jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["in.safetensors"]
    return str(caught.value)


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def like_default(**changes: Any) -> Any:
    """The default tree; `None` for a leaf that is not there, `__` for `/` in its name."""
    leaves = as_default(decoder()) | {name.replace("__", "/"): x for name, x in changes.items()}
    return shapes_of({name: x for name, x in leaves.items() if x is not None})


LAYER = "model.layers.1."
LARGE = {"model.norm.weight": np.full(DIM, 1e30, np.float32)}
LLAMA = {"model_type": "llama", **SIZES}
OWN_HEAD = {"lm_head.weight": ones(VOCAB, DIM)}  # other values than the embedding's
UNTIED = "lm_head.weight has no leaf, and other values than model.embed_tokens.weight"
A_LAYOUT = "It is a WeightLayout, the name of one, or a file with one. There are llama, qwen"
LAYERS = {f"layers__{i}__mlp__{x}_proj__kernel": None for i in range(NUM) for x in ("up", "gate")}
# Tensors in place of a model's (None: left out), options, and what is said.
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "tensors": (
        {f"{LAYER}mlp.up_proj.weight": None, "model.layers.0.extra.weight": ones(3)}, {},
        ["2 names fail", "  - tensor model.layers.0.extra.weight is not in the layout\n",
         f"  - tensor {LAYER}mlp.up_proj.weight is missing\n"],
    ),
    "shapes": (
        {f"{LAYER}self_attn.o_proj.weight": ones(3, 5)}, {"like": like_default(lm_head__kernel=(DIM, 99))},
        [f"{LAYER}self_attn.o_proj.weight [3, 5] and params/layers/1/self_attn",
         "lm_head.weight [11, 8] and params/lm_head/kernel [8, 99] do not fit: b a -> a b"],
    ),
    "leaves": (
        {}, {"like": like_default(head__kernel=(3, 3), layers__2__mlp__up_proj__kernel=None,
                                  norm__scale=None)},
        ["leaf params/head/kernel is not in the layout", "leaf [model/]layers/2/mlp/up_proj/kernel is",
         "tensor model.norm.weight has no leaf"],
    ),
    "values": (LARGE, {"dtype": "fp16"}, [
        "import params/norm/scale: it has values beyond the largest float16. No number"]),
    "floats": (
        {}, {"like": jax.tree.map(lambda x: x.update(dtype=jnp.int32), like_default())},
        ["its tensors are float32, and the leaf is int32"],
    ),
    "dtypes": (
        {f"{LAYER}mlp.up_proj.weight": ones(INNER, DIM, dtype=np.float16)},
        {"layout": jzero.LAYOUTS["llama"].extended(jzero.WeightRule(
            "model.layers.{i}.mlp.up_proj.weight", "up", "a b -> i a b"))},
        ["params/up would be of tensors of float16 and float32"],
    ),
    "config": (
        {}, {"config": {**LLAMA, "num_hidden_layers": 4, "vocab_size": 12}},
        ["tensor model.embed_tokens.weight is [11, 8], and config says [12, 8]",
         "there are 3 of the tensor layers.q_proj.weight, and config says 4"],
    ),
    "left over": (
        {f"{LAYER[:-2]}{i}.self_attn.q_proj.bias": ones(HEADS * HEAD) for i in range(NUM)},
        {"config": LLAMA}, ["self_attn.q_proj.bias is left over: config has none"],
    ),
    "tied by the tree": (OWN_HEAD, {"like": like_default(lm_head__kernel=None)}, [UNTIED]),
    "another family": (
        {**dict.fromkeys(decoder()), **values(gpt2())}, {},
        ["no tensor of a layer is there", "tensor transformer.h.0.attn.c_attn.bias is not in the layout"],
    ),
    "numbers": (
        {"model.layers.20000000.mlp.up_proj.weight": ones(2, 2)}, {},
        ["tensor model.layers.20000000.mlp.up_proj.weight is not in the layout"],
    ),
    "heads": (
        {}, {"config": LLAMA, "like": like_default(
            layers__0__self_attn__q_proj__kernel=(DIM, 2, 4),
            layers__1__self_attn__o_proj__kernel=(2, 4, DIM))},
        ["self_attn/q_proj/kernel [8, 2, 4] has heads of 4, and config says 2",
         "self_attn/o_proj/kernel [2, 4, 8] has heads of 4, and config says 2"],
    ),
    "layers": (
        {}, {"like": like_default(**LAYERS, layers__mlp__up_proj__kernel=(4, DIM, INNER),
                                  layers__mlp__gate_proj__kernel=(DIM, NUM, INNER))},
        ["params/layers/mlp/up_proj/kernel [4, 8, 12] has 4 layers in its dim 0, and the files have 3",
         "gate_proj/kernel [8, 3, 12] has 8 layers in its dim 0, and the files have 3; a rule whose axes"],
    ),
    "like without leaves": ({}, {"like": {"a": None}}, ["import: like=", "which has no leaves"]),
    "like of no arrays": ({}, {"like": {"a": 3}}, ["which has no shape and dtype"]),
    "config of another type": ({}, {"config": LLAMA | {"hidden_size": "8"}}, [
        "import: ", "hidden_size of config is '8'", "leave config out."]),
    "config of another model": ({}, {"config": {"model_type": "phi3"}}, [
        "import: ", "model_type of config is 'phi3'", "leave config out."]),
    "layout of no texts": (
        {}, {"layout": jzero.LAYOUTS["llama"].extended(ignored=(3,))},
        ["import: layout ", "ignored.0 is 3, not a text"]),
    "dtype": ({}, {"dtype": "int8"}, ["dtype='int8'"]),
    **{f"layout {x}": ({}, {"layout": x}, [A_LAYOUT]) for x in ("lama", 3)},
    "one leaf of two": (
        {}, {"layout": jzero.LAYOUTS["llama"].extended(*(jzero.WeightRule(
            f"model.layers.{{i}}.self_attn.{x}_proj.weight", "l/{i}/k/kernel", "a b -> b a") for x in "kv"))},
        ["params/l/0/k/kernel would be of model.layers.0.self_attn.k_proj.weight, and of model.layers"],
    ),
    "one after the other": (
        {}, {"layout": jzero.LAYOUTS["llama"].extended(jzero.WeightRule(
            ("lm_head.weight", "model.norm.weight"), "x/kernel",
            "x y -> y x"))},
        ["lm_head.weight + model.norm.weight differ in more than their first dim"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path):
    changes, options, texts = REFUSED[name]
    tensors = {x: y for x, y in (values(decoder()) | changes).items() if y is not None}
    said = refused(tmp_path, tensors, **options)
    assert all(text in said for text in texts), said


@pytest.mark.slow
def test_a_tied_head(tmp_path):
    """A file may have it all the same, with the same values; and a tree may have it where a file has not."""
    tensors, shapes = values(decoder(tied=True)), as_default(decoder())
    save_file(tensors, tmp_path / "tied.safetensors")
    jzero.import_weights(
        tmp_path / "tied.safetensors", tmp_path / "untied", layout="llama", like=shapes_of(shapes)
    )
    head = leaves_of(tmp_path / "untied")["params/lm_head/kernel"]
    np.testing.assert_array_equal(head, tensors["model.embed_tokens.weight"].T)
    del shapes["lm_head/kernel"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "both.safetensors")
    config = {"model_type": "llama", **SIZES, "tie_word_embeddings": True}
    for i, said in enumerate([{"like": shapes_of(shapes)}, {"config": config}]):
        jzero.import_weights(
            tmp_path / "both.safetensors", tmp_path / f"ck{i}", layout="llama", **said
        )
        assert "params/lm_head/kernel" not in leaves_of(tmp_path / f"ck{i}")


@pytest.mark.slow
def test_exports_that_cannot_be(tmp_path):
    shapes = as_default(decoder()) | {"more/kernel": (3, 3)}
    del shapes["norm/scale"]
    leaves = {name: np.ones(x, np.float32) for name, x in shapes.items()}
    ocp.PyTreeCheckpointer().save(tmp_path / "ck", {"params": tree_of(leaves)})
    with pytest.raises(jzero.CheckpointError) as caught:
        jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout="llama")
    assert "leaf params/more/kernel is not in the layout" in str(caught.value)
    assert "leaf [model/]norm/scale|weight is missing, of tensor model.norm.weight" in str(
        caught.value
    )
    leaves = {"a/kernel": np.ones((2, 2), np.float32), "b/kernel": np.ones((2, 2), np.float16)}
    ocp.PyTreeCheckpointer().save(tmp_path / "two", {"params": tree_of(leaves)})
    rule = jzero.WeightRule("ab.weight", ("a/kernel", "b/kernel"), "(n a) b -> a b")
    with pytest.raises(jzero.CheckpointError, match="would be of leaves of float16 and float32"):
        jzero.export_weights(
            tmp_path / "two", tmp_path / "out.safetensors", layout=jzero.WeightLayout("t", (rule,))
        )
    assert not (tmp_path / "out.safetensors").exists()


RULES = [
    (("", "a"), "it has no tensor, or no leaf"),
    ((("a", "b"), ("c", "d"), "x -> x"), "it has several tensors and several leaves"),
    ((("a.{i}", "b"), "c", "x -> x"), "its tensors have {i} once each, or none"),
    (("a", "b/{i}"), "and leaves only if tensors have it"),
    ((("a", "b"), "c"), "several need axes"),
    (("a", "b", "x y"), "it is not like (h k) d -> d h k"),
    (("a", "b", "x x -> x"), "an axis is there twice"),
    (("a", "b", "x -> y"), "x y is on one side only"),
    ((("a", "b"), "c", "n x -> x"), "n is on one side only"),
    (("a", ("b", "c"), "n x -> n x"), "n is an axis of one side, and counts the several of the other"),
    (("a", "b", "o i -> i o"), "i is the axis of layers"),
    (("a", "b", "", True, "c.weight"), "no rule is for c.weight alone"),
    ((3, "a"), "it is no WeightRule of texts"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "text"), RULES)
def test_rules_that_are_none(rule, text, tmp_path):
    layout = jzero.WeightLayout("mine", (jzero.WeightRule(*rule),))
    assert text in refused(tmp_path, values(decoder()), layout=layout)


@pytest.mark.slow
def test_layouts_that_are_none(tmp_path, capsys):
    (tmp_path / "t.json").write_text(json.dumps({"extends": "lama", "rules": []}))
    with pytest.raises(
        jzero.OptionError, match="layout='.*t.json': extends is 'lama', which is no layout"
    ):
        jzero.export_weights(
            tmp_path, tmp_path / "out.safetensors", layout=str(tmp_path / "t.json")
        )
    with pytest.raises(jzero.OptionError, match="dtype='int8'"):
        jzero.export_weights(tmp_path, tmp_path / "out.safetensors", dtype="int8")
    with pytest.raises(jzero.OptionError, match="config is given without a layout"):
        jzero.export_weights(tmp_path, tmp_path / "out.safetensors", config={})
    with pytest.raises(jzero.OptionError, match="like or config is given without a layout"):
        jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", like={"a": ones(1)})
    with pytest.raises(SystemExit):
        main(["import", "in", "out", "--layout", "llama", "--like", "no_such_module:shapes"])
    assert "--like: " in capsys.readouterr().err


def test_tensors_in_a_row_of_other_lengths(tmp_path):
    rule = jzero.WeightRule(("a.weight", "b.weight"), "ab/kernel", "x y -> y x")
    save_file({"a.weight": ones(2, 3), "b.weight": ones(5, 3)}, tmp_path / "in.safetensors")
    layout = jzero.WeightLayout("t", (rule,))
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout=layout)
    assert leaves_of(tmp_path / "ck")["params/ab/kernel"].shape == (3, 7)


def test_a_read_is_the_rows_of_the_whole():
    """Every range of rows of rearranged arrays, against NumPy."""
    left, right = _axes.parse("(h k) d -> (k h) d")
    sizes = {"h": 3, "k": 4, "d": 2}
    x = np.arange(24).reshape(12, 2)
    whole = x.reshape(3, 4, 2).swapaxes(0, 1).reshape(12, 2)
    move = _axes.Rearranged(_axes.Side("", left), _axes.Side("", right), sizes)
    for start in range(12):
        for stop in range(start + 1, 13):
            found = move.read(0, slice(start, stop), lambda _, index: x[index])
            np.testing.assert_array_equal(found, whole[start:stop])


def multimodal(base: str) -> Tensors:
    """Gemma 3 with a vision tower, whose text model is what the layout has."""
    text = values(decoder(FOUR, head_norms=True, tied=True))
    found = {base + name.removeprefix("model."): x for name, x in text.items()}
    more = (
        "audio.layers.0.self_attn.q_proj.weight", "vision_tower.encoder.layers.0.mlp.fc1.weight",
        "multi_modal_projector.norm.weight",
    )  # fmt: skip
    return found | {name: np.ones(3, np.float32) for name in more}


@pytest.mark.parametrize("base", ["language_model.model.", "model.language_model."])
def test_a_text_model_within_another(base, tmp_path):
    tensors = multimodal(base)
    said = refused(tmp_path, tensors, layout="gemma")
    assert (
        "no tensor of a layer is there, as model.layers.0.self_attn.q_proj.weight would be" in said
    )
    assert f"names begin with {base}: take WeightLayout.extended(base='{base}')" in said
    layout = jzero.LAYOUTS["gemma"].extended(
        base=base, ignored=("audio.*", "vision_tower.*", "multi_modal_projector.*")
    )
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout=layout)
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout=layout)
    expected = {name: x for name, x in tensors.items() if name.startswith(base)}
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_leaves_of_layers_are_numbered_from_0(tmp_path):
    leaves = {"layers/7/mlp/up_proj/kernel": np.ones((2, 2), np.float32)}
    ocp.PyTreeCheckpointer().save(tmp_path / "ck", {"params": tree_of(leaves)})
    with pytest.raises(jzero.CheckpointError, match="leaf params/layers/7/.* is not in the layout"):
        jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout="llama")


@pytest.mark.slow
def test_exports_say_whose_tensors_they_are(tmp_path):
    """Of a layout Hugging Face's, as their loaders want it; without one Flax's."""
    save_file(values(decoder()), tmp_path / "in.safetensors")
    jzero.import_weights(tmp_path / "in.safetensors", tmp_path / "ck", layout="llama")
    for layout, text in (("llama", "pt"), (None, "flax")):
        out = tmp_path / f"{text}.safetensors"
        jzero.export_weights(tmp_path / "ck", out, layout=layout)
        with safe_open(out, "np") as file:
            assert file.metadata() == {"format": text}


OTHERS = [
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}},
    {"hidden_act": "gelu"}, {"attention_bias": True},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_the_example_refuses_what_it_does_not_compute(other):
    name = "rope_type" if "rope" in str(other) else next(iter(other))
    with pytest.raises(SystemExit, match=f"config.json has .*'{name}'.*, and only"):
        example().checked({**LLAMA, **other})


@pytest.mark.slow
def test_the_example_reads_config_json_as_it_is():
    found = example().checked({
        **LLAMA, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    })  # fmt: skip
    assert (found["head_dim"], found["num_key_value_heads"]) == (DIM // HEADS, HEADS)
    assert found["rope_theta"] == 5e5
    assert example().checked({**LLAMA, "head_dim": 6})["head_dim"] == 6


def num_read() -> int:
    """Bytes that this process has read from files."""
    return int(re.findall(r"rchar: (\d+)", pathlib.Path("/proc/self/io").read_text())[0])


@pytest.mark.slow
def test_parts_of_a_file_against_numpy(tmp_path):
    rng = np.random.default_rng(0)
    (x := rng.normal(size=(2, 3, 67, 5)).astype(np.float32)).tofile(tmp_path / "data")
    file = _sources.find("test", tmp_path / "data")
    for _ in range(300):
        index = tuple(slice(*sorted(rng.choice(size + 1, 2, replace=False))) for size in x.shape)
        index = tuple(side if rng.integers(2) else slice(None) for side in index)
        found = _sources.read_part(file, 0, x.shape, x.dtype, index)
        np.testing.assert_array_equal(found, x[index])


@pytest.mark.parametrize("axes", ["b a -> i a b", "(h k) d -> d i h k", "d (h k) -> i h k d"])
def test_an_export_decodes_each_chunk_once(axes, tmp_path, monkeypatch):
    """Also of a leaf with all layers: transposed, and a block of rows of a tensor at a time."""
    monkeypatch.setattr(_stream, "AT_ONCE", 2**16)
    names = [f"x.{i}.weight" for i in range(4)]
    save_file(values(dict.fromkeys(names, (512, 256))), tmp_path / "in.safetensors")
    layout = jzero.WeightLayout("t", (jzero.WeightRule("x.{i}.weight", "x/kernel", axes),))
    shape = jax.ShapeDtypeStruct(
        {"b": (4, 256, 512), "(": (256, 4, 8, 64), "d": (4, 4, 64, 512)}[axes[0]], jnp.float32
    )
    jzero.import_weights(
        tmp_path / "in.safetensors", tmp_path / "ck", layout=layout, like={"x": {"kernel": shape}}
    )
    before = num_read()
    jzero.export_weights(tmp_path / "ck", tmp_path / "out.safetensors", layout=layout)
    assert num_read() - before < 2.2 * 4 * 512 * 256 * 4
    assert_same(load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "in.safetensors"))


def test_columns_are_read_once(tmp_path):
    tensor = values({"a.weight": (512, 1024)})["a.weight"]
    tensor.tofile(path := tmp_path / "data")
    file = _sources.find("test", path)

    before = num_read()
    for i in range(0, 1024, 32):
        index = [slice(0, 512), slice(i, i + 32)]
        found = _sources.read_part(file, 0, tensor.shape, tensor.dtype, index)
        np.testing.assert_array_equal(found, tensor[:, i : i + 32])
    assert num_read() - before < 1.2 * tensor.nbytes
    path.write_bytes(b"")
    with pytest.raises(jzero.CheckpointError, match="it has no bytes"):
        _sources.read_part(file, 0, tensor.shape, tensor.dtype, index)


def test_a_read_of_the_system_may_be_short(tmp_path, monkeypatch):
    """As of more than 2 GiB, or in a network's file system: it is continued, and nothing is damaged."""
    tensor = values({"a.weight": (40, 64)})["a.weight"]
    tensor.tofile(tmp_path / "data")
    file, preadv = _sources.find("test", tmp_path / "data"), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:50]], at))
    for columns in (slice(0, 64), slice(3, 60)):
        index = [slice(1, 40), columns]
        found = _sources.read_part(file, 0, tensor.shape, tensor.dtype, index)
        np.testing.assert_array_equal(found, tensor[tuple(index)])


def test_a_download_that_failed_is_done_again():
    """Columns of an object are read from a copy on disk, which another thread may have begun."""
    data = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)

    class Flaky:
        fails = True

        def read_range(self, name: str, start: int, stop: int) -> bytes:
            if Flaky.fails:
                Flaky.fails = False
                raise jzero.CheckpointError("the network is gone")
            return data.tobytes()[start:stop]

    file: Any = _sources.BucketFile(Flaky(), "data")  # type: ignore[arg-type]
    index = [slice(0, 64), slice(2, 5)]
    with pytest.raises(jzero.CheckpointError, match="the network is gone"):
        _sources.read_part(file, 0, data.shape, data.dtype, index)
    found = _sources.read_part(file, 0, data.shape, data.dtype, index)
    np.testing.assert_array_equal(found, data[:, 2:5])
    file._spooled[0].close()


@pytest.mark.parametrize("shape", [(70, 33), (64, 32), (3, 5, 65), (1, 40, 7), (2, 3, 4, 5)])
def test_any_transpose(shape):
    """It is copied in tiles; and axes that stay together are one."""
    names, (whole,) = "abcd"[: len(shape)], values({"": shape}).values()
    dims = [(name,) for name in names]
    for order in itertools.permutations(range(len(shape))):
        made = tuple(dims[i] for i in order)
        sizes = dict(zip(names, shape, strict=True))
        move = _axes.Rearranged(_axes.Side("", tuple(dims)), _axes.Side("", made), sizes)
        found = move.read(0, slice(0, shape[order[0]]), lambda _, index: whole[index])
        np.testing.assert_array_equal(found, whole.transpose(order))
        assert found.strides[-1] == found.itemsize


def test_a_directory_as_source(tmp_path):
    """As a download has it."""
    (folder := tmp_path / "hub").mkdir()
    with pytest.raises(
        jzero.CheckpointError, match=r"there is no model.safetensors or model.*\.json in it"
    ):
        jzero.import_weights(folder, tmp_path / "ck", layout="llama")
    save_file(values(decoder()), folder / "one.safetensors")
    index = {"weight_map": dict.fromkeys(decoder(), "one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert jzero.import_weights(folder, tmp_path / "ck", layout="llama")


@pytest.mark.slow
def test_a_user_s_files_that_cannot_be_used(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exits_at_once.py").write_text("import sys; sys.exit(3)")
    (tmp_path / "cut.json").write_text('{"rules": [')
    (tmp_path / "other.json").write_text('{"rules": [{"tensors": 3}]}')
    tables = {"ignored.json": "ignored is 'v.*', not a list", "base.json": "base is 3, not a text",
              "rules.json": "it is .*, not an object", "none.json": "rules is missing",
              "axis.json": "TypeError: .* unexpected .*'axis'",
              "optional.json": "rules.0.optional is 'false', not true or false"}  # fmt: skip
    for name, entries in {
        "ignored": {"rules": [], "ignored": "v.*"}, "base": {"rules": [], "base": 3},
        "rules": [{"tensors": "a", "leaves": "b"}], "none": {"extends": "llama"},
        "axis": {"rules": [{"tensors": "a.weight", "leaves": "a", "axis": "a b -> b a"}]},
        "optional": {"rules": [{"tensors": "a", "leaves": "b", "optional": "false"}]},
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(entries))
    found = {
        **tables, "exits_at_once.py:X": "SystemExit: 3", "no.json": "FileNotFoundError: .* No such file",
        "cut.json": "it is not JSON", "other.json": "rules.0.tensors is 3, not a text; rules.0.leaves is",
    }  # fmt: skip
    for layout, text in found.items():
        with pytest.raises(jzero.OptionError, match=f"(layout=')?{layout}(': |.*){text}"):
            jzero.import_weights("in.safetensors", "ck", layout=layout)
    for like in ("nosuch:f", "nosuch", "exits_at_once:f"):
        with pytest.raises(SystemExit, match="2"):
            main(["import", "in", "out", "--layout", "llama", "--like", like])
        error = "SystemExit: 3" if "exits" in like else "No module named 'nosuch'"
        said = " ".join(capsys.readouterr().err.split())
        assert f"{error}. It is MODULE:FUNCTION; without arguments" in said
