"""What all benchmarks of training steps take from the command line, and do before their ranks start."""

import argparse

import torch

from scratch_ddp.benchmark.option_types import count


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
