"""Real architectures, small and in float64: two steps on two ranks leave the parameters of one process.

Each is trained by one wrapper, in turn; two of them by all wrappers.
"""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scratch_ddp
from scratch_ddp import FSDP, BucketedDDP, ShardedOptimizer
from tests.ranks import in_turn

transformers = pytest.importorskip("transformers")
RANKS, ROWS, TOKENS, VOCABULARY, WIDTH = 2, 2, 6, 32, 16
WRAPPERS = {
    "simple": scratch_ddp.SimpleDistributedDataParallelism,
    "flat": scratch_ddp.FlatDDP,
    "overlapped": scratch_ddp.OverlappedDDP,
    "bucketed": lambda model: BucketedDDP(model, bucket_mb=0.01),
    "fsdp": FSDP,
    "zero": BucketedDDP,  # and a sharded optimizer
}


def make(name: str, **sizes) -> Callable[[], nn.Module]:
    """A builder of the transformers class `name` with a configuration of these sizes."""

    def build() -> nn.Module:
        model_class = getattr(transformers, name)
        return model_class(model_class.config_class(**sizes))

    return build


def decoder(name: str, **more) -> Callable[[], nn.Module]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TOKENS}
    return make(name, **sizes, **heads, **more)


class Adapted(nn.Module):
    """A frozen layer and a trained update of rank 2."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


def with_adapters() -> nn.Module:
    model = decoder("LlamaForCausalLM")().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def recomputed() -> nn.Module:
    model = decoder("Qwen3ForCausalLM", head_dim=8, tie_word_embeddings=True)()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 1))

    def forward(self, pixel_values):
        return {"loss": self.layers(pixel_values).square().mean()}


def text(generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(2, VOCABULARY, (ROWS, TOKENS), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)}


def captioned(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return images(generator) | {"input_ids": text(generator)["input_ids"], "return_loss": True}


def speech(generator: torch.Generator) -> dict[str, torch.Tensor]:
    sound = torch.randn(ROWS, 8, 2 * TOKENS, generator=generator, dtype=torch.float64)
    return {"input_features": sound, "labels": text(generator)["labels"]}


ENCODER_DECODER = {
    **{"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES = VISION | {"image_size": 8, "patch_size": 4}
CAPTIONS = VISION | {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS, "eos_token_id": 1}
T5 = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": TOKENS, "vocab_size": VOCABULARY}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
SPEECH = {"num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": TOKENS}
ARCHITECTURES = {
    "GPT-2": (make("GPT2LMHeadModel", **GPT2), text),
    "Llama": (decoder("LlamaForCausalLM"), text),
    "BERT": (make("BertForMaskedLM", vocab_size=VOCABULARY, **VISION, **NO_DROPOUT), text),
    "T5": (make("T5ForConditionalGeneration", vocab_size=VOCABULARY, decoder_start_token_id=0, **T5), text),
    "BART": (make("BartForConditionalGeneration", max_position_embeddings=TOKENS, **ENCODER_DECODER), text),
    "ViT": (
        make("ViTForImageClassification", **PATCHES, **NO_DROPOUT),
        lambda g: images(g) | {"labels": torch.arange(2)},
    ),
    "Mixtral": (decoder("MixtralForCausalLM", num_local_experts=4, experts_implementation="eager"), text),
    "Mamba": (make("MambaForCausalLM", **MAMBA), text),
    "Whisper": (make("WhisperForConditionalGeneration", **SPEECH, **ENCODER_DECODER), speech),
    "CLIP": (make("CLIPModel", text_config=CAPTIONS, vision_config=PATCHES, projection_dim=8), captioned),
    "convolutions with BatchNorm": (Convolutions, images),
    "Llama with LoRA": (with_adapters, text),
    "Qwen, recomputed": (recomputed, text),
}
ALL_WRAPPERS = ("GPT-2", "convolutions with BatchNorm")
PAIRS = list(zip(ARCHITECTURES, itertools.cycle(WRAPPERS)))
PAIRS += [(name, wrapper) for name in ALL_WRAPPERS for wrapper in WRAPPERS if (name, wrapper) not in PAIRS]


def compare(name: str, wrapper: str) -> None:
    """Train on ranks and in one process."""
    build, make_batch = ARCHITECTURES[name]
    torch.manual_seed(0)
    alone = build().double().train()
    model = WRAPPERS[wrapper](copy.deepcopy(alone))
    settings = {"lr": 0.1, "momentum": 0.9}
    plain = torch.optim.SGD(alone.parameters(), **settings)
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    if wrapper == "zero":
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, **settings)
    for step in range(2):
        batches = [make_batch(torch.Generator().manual_seed(10 * step + rank)) for rank in range(RANKS)]
        for batch in batches:
            (alone(**batch)["loss"] / RANKS).backward()
        model(**batches[dist.get_rank()])["loss"].backward()
        model.sync_gradients()
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    mine = model.gather_full_params() if wrapper == "fsdp" else dict(model.module.named_parameters())
    for key, right in alone.named_parameters():
        torch.testing.assert_close(mine[key].detach(), right.detach(), rtol=0, atol=1e-9, msg=key)


def test_two_steps_equal_one_process():
    in_turn(RANKS, compare, PAIRS, timeout=180)
