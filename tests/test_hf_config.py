"""Parameters of models from their config.json: as many as published checkpoints have, or an error."""

import json
import math
from typing import Any

import pytest

import jzero
from jzero.reports._hf_config import read_model
from small import grouped


def decoder(kind, width, inner, layers, heads, kv_heads, vocab, **others):
    return {
        "model_type": kind, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, **others,
    }  # fmt: skip


def t5(width, inner, heads, layers, **others):
    sizes = {"d_model": width, "d_ff": inner, "num_heads": heads, "num_layers": layers}
    return {"model_type": "t5", "d_kv": 64, "vocab_size": 32128, **sizes, **others}


LLAMA = decoder("llama", 4096, 11008, 32, 32, 32, 32000)
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
VIT = {
    "model_type": "vit", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "image_size": 224, "patch_size": 16,
}  # fmt: skip
CLASSES = {"id2label": {str(i): f"class {i}" for i in range(1000)}}
# What the safetensors of these checkpoints hold, tied weights once.
PUBLISHED = {
    "Llama-2-7b": (LLAMA, 6_738_415_616),
    "Meta-Llama-3-8B": (decoder("llama", 4096, 14336, 32, 32, 8, 128256), 8_030_261_248),

    "Llama-3.2-1B": (
        decoder("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (decoder("mistral", 4096, 14336, 32, 32, 8, 32000), 7_241_732_096),

    "Mixtral-8x7B-v0.1": (
        decoder("mixtral", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8),
        46_702_792_704,
    ),
    "Qwen2.5-7B": (decoder("qwen2", 3584, 18944, 28, 28, 4, 152064), 7_615_616_512),

    "Qwen3-8B": (decoder("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128), 8_190_735_360),
    "Qwen1.5-MoE-A2.7B": (
        decoder("qwen2_moe", 2048, 5632, 24, 16, 16, 151936, num_experts=60,
                moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        decoder("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128,
                moe_intermediate_size=768),
        30_532_122_624,
    ),
    "gemma-2b": (decoder("gemma", 2048, 16384, 18, 8, 1, 256000, head_dim=256), 2_506_172_416),

    "gemma-2-2b": (decoder("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256), 2_614_341_888),
    "gemma-3-1b": (decoder("gemma3_text", 1152, 6912, 26, 4, 1, 262144), 999_885_952),
    "gpt2": (GPT2, 124_439_808),

    "t5-base": (t5(768, 3072, 12, 12), 222_903_552),

    "t5-v1_1-base": (
        t5(768, 2048, 12, 12, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        247_577_856,
    ),
    "vit-base-patch16-224": (VIT | CLASSES, 86_567_656),
    "vit-base-patch16-224-in21k": (VIT | {"architectures": ["ViTModel"]}, 86_389_248),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_as_published(name):
    config, num_params = PUBLISHED[name]
    model = read_model(config)
    assert model.num_params == num_params
    # What follows from the shapes, one by one.
    shapes = [x for part in model.parts for x in part.num * list(part.shapes.values())]
    assert sum(map(math.prod, shapes)) == num_params
    assert max(map(math.prod, shapes)) == math.prod(model.largest_leaf[1])


def count(config, **others):
    return read_model(config | others).num_params


def test_what_an_entry_adds():
    """Heads, biases, layers of another kind: each by its formula."""
    assert count(LLAMA, architectures=["LlamaModel"]) == count(LLAMA) - 32000 * 4096
    assert count(LLAMA, attention_bias=True) == count(LLAMA) + 32 * 4 * 4096
    assert count(LLAMA, mlp_bias=True) == count(LLAMA) + 32 * (2 * 11008 + 4096)
    old = {key: x for key, x in LLAMA.items() if key != "num_key_value_heads"}
    assert count(old) == count(LLAMA) == count(LLAMA, num_key_value_heads=None, head_dim=None)
    gemma = PUBLISHED["gemma-2b"][0]
    assert count(gemma, tie_word_embeddings=False) == count(gemma) + 256000 * 2048
    moe = PUBLISHED["Qwen1.5-MoE-A2.7B"][0]
    sparse = 60 * 2048 + 3 * 60 * 2048 * 1408 + 3 * 2048 * 5632 + 2048
    dense = 3 * 2048 * 5632
    assert count(moe, decoder_sparse_step=2) == count(moe) - 12 * (sparse - dense)
    assert count(moe, mlp_only_layers=[0, 5, 99]) == count(moe) - 2 * (sparse - dense)
    assert count(moe, qkv_bias=False) == count(moe) - 24 * 3 * 2048
    assert count(GPT2, n_inner=1000) == count(GPT2) - 12 * (3072 - 1000) * (2 * 768 + 1)
    base = PUBLISHED["t5-base"][0]
    layer = 8 * 768 * 768 + 2 * 768 * 3072 + 3 * 768
    assert count(base, num_decoder_layers=6) == count(base) - 6 * layer
    decoding = 12 * layer + 768 + 32 * 12
    assert count(base, architectures=["T5EncoderModel"]) == count(base) - decoding
    assert count(VIT) == count(VIT, num_labels=2) == count(VIT, num_labels=0) + 2 * 769
    assert count(VIT, qkv_bias=False) == count(VIT) - 12 * 3 * 768


def test_classes_have_defaults():
    """Of a text_config, which leaves out what is its class's: of gemma-3-4b and of llava-1.5-7b."""
    gemma = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
    }
    assert count(gemma) == 3_880_263_168
    llava = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32064}
    assert count(llava) == count(LLAMA) + 2 * 64 * 4096 == 6_738_939_904
    assert count({"model_type": "mistral"}) == PUBLISHED["Mistral-7B-v0.1"][1]
    qwen = decoder("qwen2", 4096, 22016, 32, 32, 32, 151936)
    assert count({"model_type": "qwen2"}) == count(qwen)
    config = {key: x for key, x in LLAMA.items() if key != "model_type"}
    assert read_model(config | {"architectures": ["LlamaForCausalLM"]}).model_type == "llama"


def test_the_shape_of_the_loop():
    """Layers and width are the model's, unless given."""
    tiers: dict[str, Any] = {"offload_activations": jzero.PinnedHost(), "tokens": 100}
    found = jzero.estimate(LLAMA, devices=8, **grouped(**tiers))
    assert found == jzero.estimate(LLAMA, devices=8, **grouped(layers=32, width=4096, **tiers))
    with pytest.raises(jzero.OptionError, match="layers=0"):
        jzero.estimate(LLAMA, devices=8, **grouped(layers=0, **tiers))
    found = jzero.estimate(LLAMA, devices=8, model_parallel=2)
    assert "takes 193.0 MiB" in " ".join(str(found).split())


KNOWN = "There are llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, mixtral"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "bert"}, f"model_type of config is 'bert'. {KNOWN}"),
        ({"model_type": ["llama"]}, f"model_type of config is ['llama']. {KNOWN}"),
        ({"model_type": "gemma3", "text_config": {}}, "Several models are in it. Pass its text_config"),
        (LLAMA | {"architectures": ["LlamaForTokenClassification"]},
         "architectures of config is ['LlamaForTokenClassification']. Of llama there are LlamaForCausalLM, "),
        (LLAMA | {"architectures": "LlamaModel"}, "It is a list with the name of one class."),
        (LLAMA | {"architectures": [{}]}, "It is a list with the name of one class."),
        ({"model_type": "gemma", "hidden_size": 8}, "config has no num_attention_heads. The number of"),
        (LLAMA | {"num_attention_heads": 33},
         "num_attention_heads of config is 33. Heads divide the width, 4096."),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads of config is 5. They divide the heads"),
        (GPT2 | {"n_head": 5}, "n_head of config is 5. Heads divide the width, 768."),
        (VIT | {"num_attention_heads": 5}, "num_attention_heads of config is 5. Heads divide the"),
        (VIT | {"patch_size": 225}, "patch_size of config is 225. A patch is no larger than the image, 224."),
        (LLAMA | {"quantization_config": {"bits": 4}}, "Parameters of a quantised model are packed"),
        ({key: x for key, x in PUBLISHED["Qwen3-8B"][0].items() if key != "num_key_value_heads"},
         "config has no num_key_value_heads."),
        (LLAMA | {"hidden_size": 0}, "hidden_size of config is 0. It is a whole number from 1 to 10"),
        (LLAMA | {"hidden_size": True}, "hidden_size of config is True."),

        (LLAMA | {"num_hidden_layers": 10**300}, "num_hidden_layers of config is 1000000000"),

        (LLAMA | {"tie_word_embeddings": "no"}, "embeddings of config is 'no'. It is true or false."),
        (GPT2 | {"add_cross_attention": True}, "Cross-attention of GPT-2 is not counted."),
        (PUBLISHED["Qwen3-30B-A3B"][0] | {"mlp_only_layers": [[]]}, "It is a list of layers."),
        (PUBLISHED["Qwen3-30B-A3B"][0] | {"mlp_only_layers": 3}, "It is a list of layers."),
        (VIT | {"id2label": ["a"]}, "It is an object with the names of classes."),
        (t5(8, 8, 8, 8, feed_forward_proj=3), "feed_forward_proj of config is 3. It is a text."),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_what_is_not_counted_is_named(config, text):
    with pytest.raises(jzero.OptionError) as error:
        jzero.estimate(config, devices=8)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[" * 100_000, "it is 100000 values deep"),
        (b'{"hidden_size": 1e999}', "is beyond the largest number"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b"\xff", "it is not JSON"),
        (b"", "it is not JSON"),
        (b"[1]", "A configuration is one JSON object. Correct the path."),
        (b" " * (2**24 + 1), "it has more than 16777216 bytes"),
    ],
    ids=str,
)
def test_a_file_that_is_none(data, text, tmp_path):
    file = tmp_path / "x.json"
    file.write_bytes(data)
    with pytest.raises(jzero.OptionError) as error:
        jzero.estimate(file, devices=8)
    assert f"configuration {str(file)!r}" in str(error.value)
    assert text in str(error.value)


def test_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("1")
    for path, text in (
        ("none.json", "configuration 'none.json' cannot be read: No such file or directory."),
        ("x\0y", "cannot be read: Invalid argument."),
        (
            ".",
            "cannot be read: Is a directory. It is the path of a model's config.json. Write ",
        ),
        ("https://x/config.json", "It is a file, and nothing is fetched. Download the file"),
        (
            "google/gemma-2b",
            "Nothing is fetched: download config.json of that repository, and name",
        ),
        ("config.json", "has 1. A configuration is one JSON object. Get it again."),
    ):
        with pytest.raises(jzero.OptionError) as error:
            jzero.estimate(path, devices=8)
        assert text in str(error.value)
    with pytest.raises(jzero.OptionError, match="model='7even' is not .*, and no configuration"):
        jzero.estimate("7even", devices=8)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert jzero.estimate("config.json", devices=8) == jzero.estimate(LLAMA, devices=8)
