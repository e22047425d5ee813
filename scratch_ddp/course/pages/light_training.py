"""The training command with a model and sentences that load at once, for runs that start many times.

LIGHT_SLEEP: seconds that each forward sleeps, so that there is time to end a process in the middle.
"""

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import nn

from scratch_ddp.training import __main__ as command
from scratch_ddp.training.pairs import make_pairs


class Tokenizer:
    sep_token_id, pad_token_id = 1, 0

    def __call__(self, texts: Sequence[str], **_: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [[2 + ord(letter) % 62 for letter in text[:12]] for text in texts]}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.tokens, self.score = nn.Embedding(64, 16, dtype=dtype), nn.Linear(16, 2, dtype=dtype)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        if self.training:
            time.sleep(float(os.environ.get("LIGHT_SLEEP", 0)))
        mask = attention_mask[..., None].to(self.tokens.weight.dtype)
        mean = (self.tokens(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.score(torch.tanh(mean)))


def light() -> None:
    """Let the command use the light model and sentences in this process."""
    torch.set_num_threads(1)
    command.load_pairs = lambda source: make_pairs({"train": 160, "validation": 16, "test": 16})
    command.load_model = lambda source, texts, dtype: (Model(dtype), Tokenizer())


if __name__ == "__main__":
    light()
    command.main()
