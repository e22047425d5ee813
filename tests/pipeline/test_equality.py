"""A pipeline computes what one process computes: loss, gradients, evaluation, in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from scratch_ddp.pipeline import Pipeline
from scratch_ddp.pipeline.module import SCHEDULES
from tests.ddp.cases import Made
from tests.pipeline.cases import alone, batch, build, distance
from tests.ranks import in_turn, message_of, run_ranks

EXACT = 1e-12


def steps(
    whole: nn.Module, m: int, schedule: str, loss: Callable = mse_loss, data: Callable = batch, **settings: Any
) -> None:
    """Steps of a pipeline, whose gradients accumulate, beside one process; the last batch is of another size."""
    pipeline = Pipeline(copy.deepcopy(whole), m, schedule, loss, **settings)
    for step, items in enumerate((2 * m + 1, 2 * m + 1, 3 * m)):
        x, y = data(items, seed=step)
        mine = x if pipeline._home[0] == dist.get_rank() else (None, 0)[step % 2]  # anything elsewhere
        with torch.no_grad():
            found = pipeline.step(mine, y, everywhere=True) if step else None
        its = pipeline.step(mine, y, everywhere=True)
        expected = alone(whole, x, y, loss)
        assert found is None or abs(found - expected) < EXACT
        assert abs(its - expected) < EXACT and distance(pipeline, whole) < EXACT, (schedule, m, step)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_every_schedule(p):
    numbers = {1, p, p + 1, 2 * p}
    kinds = [(name, m) for name in SCHEDULES for m in numbers if name != "interleaved" or m % p == 0]
    in_turn(p, lambda name, m: steps(build(), m, name), kinds)


def special() -> nn.Sequential:
    """Checkpointed layers, each with an unused one and a parameter that is no linear layer's; the first is frozen."""

    def plain(self, x):
        return torch.tanh(self.linear(x)) * self.own + x.mean(-1, keepdim=True)

    def recomputed(self, x):
        return checkpoint(plain, self, x, use_reentrant=False)

    def layer(forward):
        linear, unused = nn.Linear(6, 6), nn.Linear(6, 6)
        return Made(forward, linear=linear, unused=unused, own=nn.Parameter(torch.full((6,), 1.5)))

    model = nn.Sequential(*map(layer, (plain, recomputed, plain, recomputed)))
    model[0].requires_grad_(False)  # nothing to train on the first rank
    return model


def in_place() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Identity())]
    return nn.Sequential(nn.Linear(6, 6), *layers)


def repeated() -> nn.Sequential:
    """One module in several places: an activation, and a block with weights, on one rank and on several."""
    block, act = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Tanh()
    return nn.Sequential(nn.Linear(6, 6), act, block, act, block, block, nn.Linear(6, 6))


def tied() -> nn.Sequential:
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, nn.Linear(6, 6), nn.LayerNorm(6), head)


def tokens(items: int, seed: int, counts: Callable = lambda row: 6) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels; from each row's count on, labels are ignored."""
    x, y = torch.randint(11, (2, items, 6), generator=torch.Generator().manual_seed(seed))
    for row, labels in enumerate(y):
        labels[counts(row) :] = -100
    return x, y


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return token_loss(logits[:, :-1], labels[:, 1:])


TOKENS = {"loss": token_loss, "data": tokens}
UNEQUAL = {"data": lambda items, seed: tokens(items, seed, counts=lambda row: 2 + row % 5)}
CASES = {
    "frozen, checkpointed and unused": (special, "1f1b", {"cuts": [1]}),
    "the same in halves": (special, "zb_h1", {"cuts": [1]}),
    "changed in place": (in_place, "1f1b", {"cuts": [4]}),  # by the first layer of the second stage
    "a module in several places": (repeated, "1f1b", {"cuts": [3]}),
    "tied ends": (tied, "1f1b", TOKENS),
    "labels ignored": (tied, "1f1b", TOKENS | UNEQUAL),
    "a micro-batch without labels": (
        tied,
        "1f1b",
        TOKENS | {"data": lambda items, seed: tokens(items, seed, counts=lambda row: row - 3 if row > 3 else 0)},
    ),
    "labels shifted": (
        tied,
        "1f1b",
        TOKENS | UNEQUAL | {"loss": shifted_loss, "count": lambda labels: int((labels[:, 1:] != -100).sum())},
    ),
}


def model_and_loss(case: str) -> None:
    build_model, schedule, settings = CASES[case]
    torch.manual_seed(0)
    steps(build_model().double(), 2, schedule, **settings)


def test_models_and_losses():
    in_turn(2, model_and_loss, [(case,) for case in CASES])


def whole_names() -> None:
    """Of a list of layers, whose tied weights become the first stage's."""
    whole = build()
    state, layers = whole.state_dict(), [*copy.deepcopy(whole)]
    layers[7].up = layers[0].up  # of stages 0 and 3, on ranks 0 and 1
    with torch.no_grad():
        layers[0].up.weight += dist.get_rank()
    pipeline = Pipeline(layers, 2, "interleaved", mse_loss)
    mine, parts = pipeline.state_dict(), [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(mine))
    assert sorted(name for part in parts for name in part) == sorted(state)
    first = {"7.up.weight": state["0.up.weight"], "7.up.bias": state["0.up.bias"]}
    assert all(torch.equal(mine[name], (state | first)[name]) for name in mine)
    assert [name for name, _ in pipeline.named_parameters()] == list(mine)
    pipeline.load_state_dict({name: each + 1 for name, each in state.items()})
    assert all(torch.equal(each, state[name] + 1) for name, each in pipeline.named_parameters())
    del state["7.down.weight"]
    said = message_of(lambda: pipeline.load_state_dict(state))
    assert said == "rank 1: the state dict does not fit: '7.down.weight' is missing or has another shape", said


def test_state_under_the_names_of_the_whole_model():
    run_ranks(2, whole_names)


def a_decoder() -> None:
    from scratch_ddp.benchmark.steps import build_llama

    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 16, "max_position_embeddings": 16}
    whole = build_llama(dtype=torch.float64, num_hidden_layers=3, **sizes, tie_word_embeddings=True)
    pipeline = Pipeline(copy.deepcopy(whole), 2, "zb_h1", shifted_loss)
    ids = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(0))
    found = pipeline.step(ids, ids, everywhere=True)
    assert set(pipeline.state_dict()) <= set(whole.state_dict())
    assert abs(found - alone(lambda ids: whole(input_ids=ids).logits, ids, ids, shifted_loss)) < EXACT
    assert distance(pipeline, whole) < EXACT


def test_a_transformers_decoder_with_tied_embeddings():
    pytest.importorskip("transformers.models.llama.modeling_llama")  # before the fork: it takes seconds
    run_ranks(4, a_decoder)
