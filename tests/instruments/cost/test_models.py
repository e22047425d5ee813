"""Sizes from a config, held against transformers' own models, and operations against published formulas.

Lesson 15 has what forwards save, what ranks hold, and the operations that torch counts, beside the formulas.
"""

import json
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from scratch_ddp.course.pages import held_by_ranks as taught
from scratch_ddp.instruments.cost import bytes_per_token, bytes_sent, flops_per_token, from_config, model_states
from scratch_ddp.instruments.cost.layouts import Layout, rank_memory
from scratch_ddp.instruments.cost.published import MEGATRON, MODELS
from scratch_ddp.instruments.cost.states import FP32, MIXED, STAGES, WIDE_GRADIENTS
from scratch_ddp.instruments.memory.use import memory_use

SMALL = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SMALL |= {"vocab_size": 128, "num_key_value_heads": 2}
IMAGES = {"vision_config": {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48, "image_size": 28}}
IMAGES["vision_config"] |= {"num_attention_heads": 2, "patch_size": 14}
CONFIGS = {  # also with what is beside the text model: norms of heads, a tower for images
    "Llama, tied": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "Mistral, wide heads": {"model_type": "mistral", **SMALL, "head_dim": 128},
    "GPT-2, n_inner null": {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_inner": None},
    "Qwen 3": {"model_type": "qwen3", **SMALL},
    "DeepSeek-V3, latent": {"model_type": "deepseek_v3", **SMALL, "num_key_value_heads": 4}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "gpt-oss, biases of experts": {"model_type": "gpt_oss", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Gemma-3, nested": {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **IMAGES}
    | {"text_config": {"model_type": "gemma3_text", **SMALL}},
    "LLaVA, no sizes of its own": {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], **IMAGES}
    | {"text_config": {"model_type": "llama", **SMALL}},
    "Qwen2.5-VL, flat": {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"], **SMALL}
    | {"vision_config": {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48}},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model_itself(name, tmp_path):
    """All of them, and in blocks, embedding, head and last norm all but those of a tower and of what is rare."""
    config = CONFIGS[name]
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    whole = auto.from_config(AutoConfig.for_model(**config))
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = from_config(tmp_path, name)
    counted = {path: each.numel() for path, each in whole.named_parameters()}
    assert shape.parameters == sum(counted.values())
    text = sum(size for path, size in counted.items() if "vis" not in path and "project" not in path)
    assert shape.parameters - shape.beside == pytest.approx(text, rel=0.01) or shape.positions
    assert shape.tied == (name in ("Llama, tied", "GPT-2, n_inner null", "Gemma-3, nested"))
    assert (shape.idle > 0) == (name in ("DeepSeek-V3, latent", "gpt-oss, biases of experts"))


@pytest.mark.parametrize("name", taught.CONFIGS)
def test_sums_are_what_is_counted(name):
    counted, formula = from_config(taught.CONFIGS[name], name), taught.SHAPES[name]
    assert counted.parameters == formula.parameters and counted.block == formula.block
    assert bytes_per_token(counted) == bytes_per_token(formula)
    assert flops_per_token(counted, 64) == flops_per_token(formula, 64)


@pytest.mark.parametrize("name, kind", {"DeepSeek-V3": "deepseek_v3", "Mixtral-8x7B": "mixtral"}.items())
def test_known_mixtures_are_what_is_counted(name, kind):
    assert from_config(AutoConfig.for_model(kind), name) == MODELS[name]  # transformers' default sizes are theirs


@pytest.mark.parametrize(
    "config, says",
    [("{}", "model_type"), ('{"model_type": "abacus"}', "abacus"), ("no JSON", "config")]
    + [('{"model_type": "mamba"}', "no attribute 'num_attention_heads'")],
)
def test_a_bad_config_is_refused_in_a_sentence(config, says, tmp_path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=says):
        from_config(tmp_path / "config.json")


def test_operations():
    shape = MODELS["Llama-3-8B"]
    assert shape.parameters == 8_030_261_248  # of the model's card on the hub
    matrices = shape.parameters - shape.embedding - shape.last_norm - 64 * shape.width
    attention = 12 * shape.blocks * shape.width * 4096  # heads times their width is the model's width
    assert flops_per_token(shape, 4096) == 6 * matrices + attention
    assert flops_per_token(shape, 4096, recomputes=True) == flops_per_token(shape, 4096) * 4 / 3 - 2 * shape.head
    for run in MEGATRON:  # its formula: 96 B s l h² (1 + s/6h + V/16lh), where the head counts as here
        h, blocks, s = run.shape.width, run.shape.blocks, run.sequence
        theirs = 96 * blocks * h**2 * (1 + s / (6 * h) + run.shape.vocabulary / (16 * blocks * h))
        assert flops_per_token(run.shape, s, recomputes=True) == pytest.approx(theirs, rel=1e-3)


def test_the_peak_at_the_loss():
    """A vocabulary beside which nothing counts."""
    config = AutoConfig.for_model("llama", **SMALL | {"vocab_size": 32_000, "num_hidden_layers": 1})
    small = AutoModelForCausalLM.from_config(config).bfloat16()
    ids = torch.randint(32_000, (4, 256))
    small(input_ids=ids[:, :8], labels=ids[:, :8]).loss.backward()
    with memory_use() as used:
        found = small(input_ids=ids, labels=ids)  # it keeps the logits
        found.loss.backward()
    assert used.peak_bytes == pytest.approx(rank_memory(from_config(config), Layout(micro=4), 256).logits, rel=0.1)


def test_half_of_the_matrices():
    """What a block of a model holds after forward, under torch's selective checkpointing with torchtitan's rule."""

    def keeps(products, context, operator, *_, **__):
        products[context.is_recompute] += operator is torch.ops.aten.mm.default
        is_every_second = operator is torch.ops.aten.mm.default and products[context.is_recompute] % 2
        kept = is_every_second or "scaled_dot_product" in operator.name()
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def held(blocks: int) -> int:
        config = AutoConfig.for_model("llama", **SMALL | {"num_hidden_layers": blocks, "use_cache": False})
        model, ids = AutoModelForCausalLM.from_config(config).bfloat16(), torch.randint(128, (4, 64))
        for block in model.model.layers:
            contexts = lambda: create_selective_checkpoint_contexts(partial(keeps, Counter()))  # noqa: E731
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        with memory_use() as used:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()  # with as many products as before
        return used.kept_bytes

    shape = from_config(AutoConfig.for_model("llama", **SMALL))
    assert (held(4) - held(3)) / (4 * 64) == pytest.approx(bytes_per_token(shape, checkpointing="half"), rel=0.05)


def test_model_states_are_those_of_the_zero_paper():
    """Figure 1: 7.5 billion parameters, 64 ranks, Adam in mixed precision; in 10⁹ bytes."""
    totals = [model_states(7_500_000_000, 64, stage, MIXED).total / 1e9 for stage in STAGES]
    assert [round(total, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    fsdp = [bytes_sent(10, 2, "ZeRO-3", each) for each in (WIDE_GRADIENTS, FP32)]  # gradients reduced in float32
    assert fsdp[0] / fsdp[1] == 2 / 3
    wide = model_states(1000, 4, "ZeRO-3", WIDE_GRADIENTS, gathered=100)
    assert (wide.gradients, wide.gathered) == (4 * 250, (2 + 4) * 100)
