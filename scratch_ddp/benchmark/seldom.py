"""Ranks that meet once in H steps (DiLoCo), beside gradients averaged at every step, on equally much text.

Every rank trains a small language model on its own sentences, none of them twice, about one or two of six places.
Lesson 18 has the losses.
"""

import json
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.benchmark import steps
from scratch_ddp.course.lessons.lesson_18 import outer_step
from scratch_ddp.instruments.forked_ranks import run_ranks
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.training.data import sentences
from scratch_ddp.training.models import build_small
from scratch_ddp.training.pairs import PLACES, make_pairs

STEPS = 1000  # of each rank
RANKS, ROWS, LENGTH = 4, 2, 32  # in each step, a rank has so many rows of so many tokens
SIZES = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 1}
WAYS = {"gradients at every step": None, "never": None}  # name: steps from one meeting to the next
WAYS |= {f"DiLoCo, once in {every}": every for every in (1, 10, 100, 500)}


def rows(rounds: int) -> Iterator[steps.Row]:
    found = run_ranks(RANKS, measure, rounds, STEPS, timeout=3600)[0]
    for way, runs in found["ways"].items():
        losses, sent = runs["losses"], runs["bytes"] / 1e6
        loss = f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})"
        yield way, f"loss {loss}, {sent:.2f} MB sent by a rank"
    print(json.dumps(found))  # as lesson 18 keeps it


def measure(seeds: int, count: int) -> dict:
    """On each rank: every way for every seed. A loss is that of rank 0's weights on sentences about all places."""
    texts = sentences(make_pairs({"train": 15 * count})["train"])
    mine = [each for each in texts[400:] if any(place in each for place in PLACES[dist.get_rank() :: RANKS])]
    _, tokenizer = small_model(texts)
    test = tokens(tokenizer, texts[:400], 64)
    batches = tokens(tokenizer, mine, count * ROWS).view(count, ROWS, LENGTH)
    ways: dict[str, dict] = {}
    for seed in range(seeds):
        for name in WAYS:
            torch.manual_seed(seed)
            model, _ = small_model(texts)
            with traffic() as counted:
                train(model, batches, name)
            with torch.no_grad():
                loss = model(input_ids=test, labels=test).loss.item()
            runs = ways.setdefault(name, {"losses": [], "bytes": counted.wire_bytes})
            runs["losses"].append(round(loss, 4))
    parameters = [each.numel() for each in model.parameters()]
    return {"parameters": parameters, "ranks": RANKS, "steps": count, "tokens": count * ROWS * LENGTH, "ways": ways}


def small_model(texts: list[str]) -> tuple[nn.Module, Any]:
    return build_small("language model", texts[:1600], **SIZES)


def tokens(tokenizer: Any, texts: list[str], rows: int) -> torch.Tensor:
    return torch.tensor(tokenizer(" ".join(texts))["input_ids"])[: rows * LENGTH].view(rows, LENGTH)


def train(model: nn.Module, batches: torch.Tensor, way: str) -> None:
    """AdamW with a learning rate that falls to 0 along a cosine; DiLoCo's outer step as its authors have it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    agreed = [parameter.detach().clone() for parameter in model.parameters()]
    velocity = [torch.zeros_like(each) for each in agreed]
    for step, ids in enumerate(batches, start=1):
        model(input_ids=ids, labels=ids).loss.backward()
        if way == "gradients at every step":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()
        falling.step()
        if WAYS[way] and step % WAYS[way] == 0:
            outer_step([parameter.data for parameter in model.parameters()], agreed, velocity, lr=0.7, momentum=0.9)
