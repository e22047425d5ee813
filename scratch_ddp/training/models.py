"""Models that tell whether two sentences say the same: SmolLM2 from the hub, or a small built-in one like it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.common.extras import extra
from scratch_ddp.training.data import sentences
from scratch_ddp.training.pairs import make_pairs
from scratch_ddp.training.sources import HubFiles, choose_for_all, first_rank_first, print_once

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores and may be forked

SMOLLM2 = HubFiles(
    "HuggingFaceTB/SmolLM2-360M-Instruct",
    ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
)
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
HEADS = ("classifier", "language model")


def load_model(
    source: str | None = None,
    head: str = "classifier",
    texts: Iterable[str] | None = None,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
    **sizes: Any,
) -> tuple[torch.nn.Module, Any]:
    """Return (model, tokenizer): SmolLM2-360M-Instruct, or the same architecture small, with random weights.

    `source`, or else the environment variable SCRATCH_DDP_MODEL, is "hub", "built-in", or a folder with a saved
    transformers model. Without either, the hub is taken if it answers within seconds or its files are cached (724 MB,
    downloaded once by rank 0), else the built-in model. A printed line says which.
    `head` "classifier" scores two classes; "language model" scores the next token, its weights tied to the embedding.
    The built-in tokenizer is built from `texts`, or from the built-in pairs. `sizes` change the built-in architecture,
    with the names of transformers' LlamaConfig. New weights come from torch's random numbers: set the same seed on
    every rank before. Every rank of the group calls it; a failure on one rank raises ValueError on all.
    """
    if head not in HEADS:
        raise ValueError(f"head: {head!r}; allowed are {', '.join(HEADS)}")
    place, why = choose_for_all(source, "SCRATCH_DDP_MODEL", SMOLLM2, group)
    if place == "built-in":
        model, tokenizer = build_small(head, texts, dtype, **sizes)
    else:
        model, tokenizer = first_rank_first(lambda: _read(place, head, dtype), group)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    name = SMOLLM2.repository if place == "hub" else place
    print_once(f"model: {name} ({why}); {millions:.1f} M parameters", group)
    return model, tokenizer


def build_small(
    head: str = "classifier", texts: Iterable[str] | None = None, dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[torch.nn.Module, Any]:
    """Return the small model with random weights, and its tokenizer. No network, no communication."""
    with extra("text"):
        from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    tokenizer = build_tokenizer(texts)
    config = LlamaConfig(
        **{
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "num_labels": 2,
            "use_cache": False,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            **SMALL,
            **sizes,
        }
    )
    model = (LlamaForSequenceClassification if head == "classifier" else LlamaForCausalLM)(config)
    return model.to(dtype), tokenizer


def build_tokenizer(texts: Iterable[str] | None = None, vocabulary: int = 2048) -> Any:
    """Return a byte-level BPE tokenizer built from `texts`. It is deterministic, and can encode any text."""
    with extra("text"):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

    if texts is None:
        texts = sentences(make_pairs()["train"])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<end>", sep_token="<end>")


def _read(place: str, head: str, dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    with extra("text"):
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

    folder = SMOLLM2.fetch() if place == "hub" else Path(place).expanduser()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would warn that the classifier's head is new, which is intended
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        if head == "classifier":
            options = {"num_labels": 2, "pad_token_id": tokenizer.pad_token_id}
            model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, **options)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except Exception as error:
        raise ValueError(f"{place!r} holds no model that can be read: {type(error).__name__}: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    model.config.use_cache = False
    return model, tokenizer
