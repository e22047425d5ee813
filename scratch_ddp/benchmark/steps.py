"""What the benchmarks of training steps share: their options, the Llama that they train, a step, a table of times."""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from scratch_ddp.benchmark.command import TableRow, positive_count, report
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


def add_arguments(parser: argparse.ArgumentParser, rounds: int, on_gpus: bool = True) -> None:
    """Add --rounds, with its default, and --ranks; --backend too for what can run `on_gpus`."""
    parser.add_argument("--rounds", type=positive_count, default=rounds, help=f"timed steps of each kind ({rounds})")
    parser.add_argument("--ranks", type=positive_count, default=2, help="number of ranks (2)")
    if on_gpus:
        parser.add_argument("--backend", choices=("gloo", "nccl"), help="gloo on CPUs (default), nccl on GPUs")
    parser.set_defaults(backend="gloo")


def run(
    options: argparse.Namespace,
    title: str,
    measure: Callable[[argparse.Namespace, str], tuple[list[TableRow], str]],
) -> int:
    """Print the title, what `measure(options, device type)` returns (rows and a table), and return the exit status."""
    gpus = torch.cuda.device_count()
    if options.backend == "nccl" and gpus < options.ranks:
        print(f"--backend nccl: {gpus} GPUs for {options.ranks} ranks", file=sys.stderr)
        return 2
    print(f"{title}, {options.ranks} ranks, {options.backend}, {machine()}.\n", flush=True)
    torch.set_num_threads(1)  # ranks are forked from this process
    _import_early()
    rows, table = measure(options, "cuda" if options.backend == "nccl" else "cpu")
    return report(rows, before=table)


def _import_early() -> None:
    """Imports at first use that take seconds: once here, not in every rank."""
    import torch._dynamo  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401


def sample_on_ranks(options: argparse.Namespace, measure: Callable[..., Any], *args: Any) -> Any:
    """Call `measure(rounds, *args)` on the ranks, and return the first one's answer."""
    timeout = 60 + 30.0 * options.rounds
    return run_ranks(options.ranks, measure, options.rounds, *args, backend=options.backend, timeout=timeout)[0]


def build_llama(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """Return a LlamaForCausalLM with weights from `seed`, the same on every rank. `model(**batch).loss` is its loss.

    It has six blocks, and embeddings not tied to the head; `sizes` change that, with the names of transformers'
    LlamaConfig. No communication, no network.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**LLAMA, "tie_word_embeddings": False, "use_cache": False, **sizes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


def make_batch(
    rank: int = 0, device: torch.device | str = "cpu", vocabulary: int = VOCABULARY
) -> dict[str, torch.Tensor]:
    """Return a rank's own random batch: `input_ids` and `labels`, both int64 (4, 32). The same at every call."""
    ids = torch.randint(vocabulary, (4, 32), generator=torch.Generator().manual_seed(rank)).to(device)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **batch: torch.Tensor) -> None:
    """Forward, backward, synchronisation, and the optimizer's step if there is one."""
    loss = model(**batch)
    loss = getattr(loss, "loss", loss)  # the rest of the output must not take memory during backward
    loss.backward()
    getattr(model, "sync_gradients", lambda: None)()  # torch's wrappers don't have it
    if optimizer is not None:
        optimizer.step()
    model.zero_grad()


def times_table(
    samples: Mapping[str, Sequence[Sample]], reference: str, figures: Sequence[str] = ("cpu", "wall")
) -> str:
    """All strategies as Markdown: their ratios to the reference with quartiles, and medians in milliseconds."""
    called = ["CPU" if figure == "cpu" else figure for figure in figures]
    head = ["strategy", *(f"{each} / {reference}" for each in called), *(f"{each} ms" for each in called)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, each in samples.items():
        ratios = [str(ratio(each, samples[reference], figure)) for figure in figures]
        medians = [f"{1e3 * statistics.median(getattr(one, figure) for one in each):.0f}" for figure in figures]
        lines.append(f"| {' | '.join([name, *ratios, *medians])} |")
    return "\n".join(lines)
