"""Models that tell whether two sentences say the same: SmolLM2 from the hub, or a small built-in one like it."""

import os
from collections.abc import Iterable
from typing import Any

import torch

from scratch_ddp.training.data import print_once, sentences
from scratch_ddp.training.pairs import make_pairs

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores and may be forked

SMOLLM2 = "HuggingFaceTB/SmolLM2-360M-Instruct"
SMALL = {  # SmolLM2's architecture (Llama) with small sizes
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.06,
}
SMOLLM2_360M = {  # the real sizes: `load_model("built-in", **SMOLLM2_360M)` is SmolLM2 with random weights
    "vocab_size": 49152,
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "initializer_range": 0.02,
}
HEADS = {"classifier": "SequenceClassification", "language model": "CausalLM"}  # in transformers' names


def load_model(
    source: str | None = None,
    head: str = "classifier",
    texts: Iterable[str] | None = None,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> tuple[torch.nn.Module, Any]:
    """Return (model, tokenizer): a small Llama with random weights, SmolLM2-360M-Instruct, or a saved model.

    `source` is "built-in" (the default), "hub" (SmolLM2, 724 MB, downloaded once), or a folder with a transformers
    model. Rank 0 prints what it is. `head` "classifier" scores two classes; "language model" scores the next token,
    its weights tied to the embedding. The built-in tokenizer is built from `texts`, or from the built-in pairs; `sizes`
    change the built-in architecture, with the names of transformers' LlamaConfig. New weights come from torch's random
    numbers: set the same seed on every rank before. Raises what transformers does. No communication.
    """
    place = source or "built-in"
    if place == "built-in":
        model, tokenizer = build_small(head, texts, dtype, **sizes)
    else:
        import transformers

        name = SMOLLM2 if place == "hub" else place
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        options = {"num_labels": 2, "pad_token_id": tokenizer.pad_token_id, "use_cache": False, "dtype": dtype}
        model = getattr(transformers, f"AutoModelFor{HEADS[head]}").from_pretrained(name, **options)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print_once(f"model: {place} ({'as asked' if source else 'the default'}); {millions:.1f} M parameters")
    return model, tokenizer


def build_small(
    head: str = "classifier", texts: Iterable[str] | None = None, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[torch.nn.Module, Any]:
    """Return the small model with random weights, and its tokenizer. No network, no communication."""
    import transformers

    tokenizer = build_tokenizer(texts)
    tokens = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    others = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "num_labels": 2, "use_cache": False}
    config = transformers.LlamaConfig(**{"vocab_size": len(tokenizer), **tokens, **others, **SMALL, **sizes})
    return getattr(transformers, f"LlamaFor{HEADS[head]}")(config).to(dtype), tokenizer


def build_tokenizer(texts: Iterable[str] | None = None) -> Any:
    """Return a byte-level BPE tokenizer built from `texts`. It is deterministic, and can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if texts is None:
        texts = sentences(make_pairs()["train"])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    letters = {"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()), "special_tokens": ["<pad>", "<end>"]}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=2048, show_progress=False, **letters))
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>", sep_token="<end>")
