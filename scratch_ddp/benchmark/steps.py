"""What the benchmarks share: the Llama that they train, a step, and the table of what their `rows(rounds)` yield."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.timing import Sample, machine, ratio

VOCABULARY = 8192
LLAMA = {  # 15.7 M parameters in 57 tensors
    "vocab_size": VOCABULARY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}

Row = tuple[str, str]  # what was measured, and the figure


def show(what: str, rows: Iterable[Row]) -> None:
    """Print what is measured where, then the rows as a table of Markdown."""
    print(f"{what}\n\nRanks over gloo, {machine()}.\n", flush=True)
    prepare()
    print("| what | measured |\n|---|---|")
    for name, figure in rows:
        print(f"| {name} | {figure} |", flush=True)


def prepare() -> None:
    """Get the process ready to be forked into ranks."""
    torch.set_num_threads(1)
    for name in ("torch._dynamo", "torch.distributed.pipelining", "transformers.models.llama.modeling_llama"):
        importlib.import_module(name)  # at first use it takes seconds: once here, not in every rank


def on_ranks(ranks: int, measure: Callable[..., Any], rounds: int, *args: Any) -> Any:
    """Call `measure(rounds, *args)` on so many ranks, and return the first one's answer."""
    return run_ranks(ranks, measure, rounds, *args, timeout=60 + 60.0 * rounds)[0]


def build_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """Return a LlamaForCausalLM with weights from `seed`, the same on every rank. `model(**batch).loss` is its loss.

    `sizes` change LLAMA's, with the names of transformers' LlamaConfig. No communication, no network.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": False, "use_cache": False, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def make_batch(rank: int = 0, vocabulary: int = VOCABULARY) -> dict[str, torch.Tensor]:
    """Return a rank's own random batch: `input_ids` and `labels`, both int64 (4, 32). The same at every call."""
    ids = torch.randint(vocabulary, (4, 32), generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "labels": ids}


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits (rows, tokens, vocabulary) for targets (rows, tokens)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **batch: torch.Tensor) -> None:
    """Forward, backward, synchronisation, and the optimizer's step if there is one."""
    loss = model(**batch)
    loss = getattr(loss, "loss", loss)  # the rest of the output must not take memory during backward
    loss.backward()
    getattr(model, "sync_gradients", lambda: None)()  # torch's wrappers don't have it
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


def beside(samples: Mapping[str, Sequence[Sample]], pairs: Iterable[tuple[str, str]]) -> list[Row]:
    """A row for each pair (ours, theirs): processor time and time in units of theirs, median [quartiles]."""
    rows = []
    for ours, theirs in pairs:
        cpu, wall = (ratio(samples[ours], samples[theirs], figure) for figure in ("cpu", "wall"))
        rows.append((f"{ours} / {theirs}, {len(samples[ours])} rounds", f"processor time {cpu}, time {wall}"))
    return rows
