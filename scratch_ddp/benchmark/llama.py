"""The model that strategies are timed with: transformers' Llama, 15.7 M parameters in 57 tensors, random weights."""

from typing import Any

import torch

VOCABULARY = 8192
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def build_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> torch.nn.Module:
    """Return a LlamaForCausalLM with weights from `seed`, the same on every rank. `model(**batch).loss` is its loss.

    Six blocks, embeddings not tied to the head; `sizes` change that, under the names of transformers' LlamaConfig. No
    communication, no network.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SIZES, "tie_word_embeddings": False, "use_cache": False, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def make_batch(rank: int = 0, rows: int = 4, tokens: int = 32, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Return a rank's own random batch: `input_ids` and `labels`, both int64 (rows, tokens). The same at every call."""
    ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}
