"""Sizes and parameters from a config: exact, held against transformers' own models, which have no data here."""

import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from scratch_ddp.instruments.cost import MODELS, ModelShape, flops_per_token, from_config, model
from scratch_ddp.instruments.cost.__main__ import main
from scratch_ddp.instruments.cost.layouts.models import MEGATRON

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SMALL |= {"vocab_size": 128, "num_key_value_heads": 2}
CONFIGS = {
    "Llama": LlamaConfig(**SMALL),
    "Llama, tied, biases": LlamaConfig(**SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "Llama, wide heads": LlamaConfig(**SMALL, head_dim=32),
    "Mistral": MistralConfig(**SMALL),
    "Qwen 2": Qwen2Config(**SMALL),
    "Qwen 3": Qwen3Config(**SMALL),
    "Mixtral": MixtralConfig(**SMALL, num_local_experts=4),
    "DeepSeek-V3": DeepseekV3Config(num_hidden_layers=4, n_routed_experts=8, n_group=2, topk_group=1),
    "GPT-2": GPT2Config(n_layer=3),
    "GPT-2, other MLP": GPT2Config(n_layer=2, n_embd=48, n_head=4, n_inner=100, n_positions=64, vocab_size=99),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_the_model(config, tmp_path):
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    shape = from_config(config)
    assert shape.parameters == sum(parameter.numel() for parameter in whole.parameters())
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    assert from_config(tmp_path / "config.json", shape.name) == shape
    if not shape.experts:
        block = (whole.model.layers if hasattr(whole, "model") else whole.transformer.h)[0]
        assert shape.block == sum(parameter.numel() for parameter in block.parameters())


def test_published_counts():
    assert MODELS["Llama-3-8B"].parameters == 8_030_261_248  # of the model's card on the hub
    assert MODELS["Llama-3-405B"].parameters == 405_853_388_800
    assert MODELS["GPT-2"].parameters == 124_439_808
    found = MODELS["DeepSeek-V3"]
    assert (round(found.parameters / 1e9), round(found.active_parameters / 1e9)) == (671, 38)  # its paper: 671, 37
    for run in MEGATRON[1:]:  # the first is 1.65, printed as 1.7
        assert f"GPT {run.shape.parameters / 1e9:.1f}B".replace(".0B", "B") == run.shape.name


def test_operations_are_six_for_each_parameter_and_the_attentions():
    shape = MODELS["Llama-3-8B"]
    matrices = shape.parameters - shape.embedding - shape.last_norm - 64 * shape.width
    attention = 12 * shape.blocks * shape.width * 4096  # heads times their width is the model's width
    assert flops_per_token(shape, 4096) == 6 * matrices + attention
    assert flops_per_token(MODELS["XXL"], 4096) == 6 * MODELS["XXL"].parameters
    mixture = MODELS["Mixtral-8x7B"]
    assert flops_per_token(mixture, 0) == pytest.approx(6 * mixture.active_parameters, rel=0.02)
    again = flops_per_token(shape, 4096, recomputes=True)
    head = 2 * shape.vocabulary * shape.width
    assert again == flops_per_token(shape, 4096) * 4 / 3 - head  # the head is not done again


def test_the_operations_of_the_megatron_paper():
    """Its formula, with recomputation: 96 B s l h² (1 + s/6h + V/16lh), where the head counts as here."""
    for run in MEGATRON:
        shape, s = run.shape, run.sequence
        h, blocks = shape.width, shape.blocks
        theirs = 96 * blocks * h**2 * (1 + s / (6 * h) + shape.vocabulary / (16 * blocks * h))
        assert flops_per_token(shape, s, recomputes=True) == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    "config, says",
    [
        ({}, "no hidden_size and no num_hidden_layers and no num_attention_heads"),
        ({"model_type": "gpt2"}, "no hidden_size and no num_hidden_layers"),
        (SMALL | {"hidden_size": None}, "the config has no hidden_size: these sizes"),
        (SMALL | {"num_hidden_layers": 0}, "num_hidden_layers must be 1 or more, not 0"),
        (SMALL | {"num_key_value_heads": 3}, "4 heads can't share 3 of keys and values evenly"),
        (SMALL | {"model_type": "t5"}, "model_type 't5' is not known: .* known are llama, mistral"),
        (SMALL | {"model_type": "mixtral"}, "the config has no num_local_experts"),
        (SMALL | {"model_type": "deepseek_v3"}, "no moe_intermediate_size and no first_k_dense_replace"),
        ("nowhere/config.json", "can't be read as JSON"),
    ],
)
def test_a_bad_config_is_refused_in_a_sentence(config, says):
    with pytest.raises(ValueError, match=says):
        from_config(config)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="there is no model 'llama', and no such file; there are XXL"):
        model("llama")
    assert model("gpt-2") is MODELS["GPT-2"]
    with pytest.raises(ValueError, match="width must be 1 or more, not 0"):
        ModelShape("none", 1, 0, 1)


def test_the_command_takes_a_config(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert main(["--gpus", "2", "--batch", "4", "--sequence", "128", "--model", str(tmp_path)]) == 0
    found = capsys.readouterr().out
    assert f"{from_config(SMALL).parameters:,} parameters" in found
    assert "2 H100, 4 sequences of 128 tokens a step:\n   dp  tp  pp" in found and "device hours, $" in found
