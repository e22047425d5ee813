"""Numbers of the command line: `type=` of an option. argparse refuses a bad one, with status 2, before all else."""

import argparse
import math
from typing import Any

import torch


def count(text: str) -> int:
    """How often or how many: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, is needed, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """How long: a number of seconds, more than 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:  # nan is not
        raise argparse.ArgumentTypeError(f"a number of seconds, more than 0, is needed, not {text!r}")
    return value


# FOLDED: What all benchmarks of training steps take from the command line, and do before their ranks start.


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add --rounds, with its default, and --ranks."""
    parser.add_argument("--rounds", type=count, default=rounds, help=f"steps of each kind that are timed ({rounds})")
    parser.add_argument("--ranks", type=count, default=2, help="ranks (2)")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add --backend, for benchmarks that run on GPUs too."""
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="gloo on CPUs, nccl on GPUs")


def problem(options: argparse.Namespace) -> str | None:
    """Say why these options can't be run here, or return None."""
    if getattr(options, "backend", "gloo") == "nccl" and torch.cuda.device_count() < options.ranks:
        return f"--backend nccl: {torch.cuda.device_count()} GPUs for {options.ranks} ranks"
    return None


def import_early() -> None:
    """What is imported at first use takes seconds: once here, not in every rank."""
    import torch._dynamo  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401


# FOLDED: The model that strategies are timed with: transformers' Llama, 15.7 M parameters in 57 tensors, random weights.

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
