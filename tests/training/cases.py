"""What tests of training share: a few pairs, a model that takes milliseconds a step, the command on a rank."""

import sys
from typing import Any
from unittest import mock

# Optimizers and models import these at first use: once here, not in every forked rank.
import torch._dynamo  # noqa: F401
import torch.distributed as dist
from transformers import LlamaForSequenceClassification  # noqa: F401

from scratch_ddp.training import __main__ as command
from scratch_ddp.training.pairs import make_pairs
from tests.ranks import captured

PAIRS = make_pairs({"train": 160, "validation": 20, "test": 20})
TINY = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1}


def run_command(*options: str) -> tuple[Any, str]:
    """Run the command in this rank's group; return its exit status or last words, and what it printed."""
    sys.argv = ["training", "--device=cpu", *options]

    def ended() -> Any:
        try:
            return command.main()
        except SystemExit as left:
            return left.code

    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        return captured(ended)
