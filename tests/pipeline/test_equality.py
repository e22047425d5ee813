"""A pipeline computes what one process computes: loss, gradients, evaluation, in float64."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from scratch_ddp.pipeline import Pipeline
from scratch_ddp.pipeline.schedules import Action
from tests.pipeline.cases import SCHEDULES, alone, batch, build, distance, message_of, pipeline_of
from tests.ranks import run_ranks

EXACT = 1e-12


def every_schedule() -> float:
    """The largest distance over schedules, micro-batches of equal and of different sizes, one and more steps."""
    p, worst = dist.get_world_size(), 0.0
    for name in SCHEDULES:
        for m, items in ((p, p), (2 * p, 5 * p + 1), (1, 3), (p + 1, 4 * p)):
            if name == "interleaved" and m % p:
                continue
            whole = build()
            pipeline = pipeline_of(whole, m, name)
            for step in range(2):  # gradients accumulate
                x, y = batch(items, seed=step)
                loss = pipeline.step(x, y, everywhere=True)
                worst = max(worst, abs(loss - alone(whole, x, y)), distance(pipeline, whole))
    return worst


@pytest.mark.parametrize("p", [1, 2, 4])
def test_gradients_of_every_schedule(p):
    assert max(run_ranks(p, every_schedule)) < EXACT


def a_changing_batch() -> float:
    whole = build()
    pipeline, worst = pipeline_of(whole, 3), 0.0
    for step, items in enumerate((7, 7, 4, 9, 9)):
        x, y = batch(items, seed=step)
        mine = (x, None) if dist.get_rank() == 0 else (None, y)
        loss = pipeline.step(*mine)
        assert (loss is None) == (dist.get_rank() == 0)
        expected = alone(whole, x, y)
        worst = max(worst, distance(pipeline, whole), abs((loss or expected) - expected))
    return worst


def test_batches_of_changing_size_and_inputs_where_they_are_needed():
    assert max(run_ranks(2, a_changing_batch)) < EXACT


class Special(nn.Module):
    """Checkpointed, with a frozen layer, an unused one, and one that is not nn.Linear itself."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.linear, self.unused = kind, nn.Linear(6, 6), nn.Linear(6, 6)
        self.own = nn.Parameter(torch.full((6,), 1.5))
        if kind == "frozen":
            self.linear.requires_grad_(False)

    def forward(self, x):
        if self.kind == "checkpointed":
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x):
        return torch.tanh(self.linear(x)) * self.own + x.mean(-1, keepdim=True)


def special_stages(schedule: str) -> float:
    torch.manual_seed(0)
    kinds = ("frozen", "checkpointed", "plain", "checkpointed")
    whole = nn.Sequential(*map(Special, kinds)).double()
    whole[0].requires_grad_(False)  # nothing to train on the first rank
    pipeline = pipeline_of(whole, 3, schedule, cuts=[1])
    worst = 0.0
    for step in range(2):
        x, y = batch(7, seed=step)
        loss = pipeline.step(x, y, everywhere=True)
        worst = max(worst, abs(loss - alone(whole, x, y)), distance(pipeline, whole))
    return worst


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_frozen_checkpointed_and_unused_layers(schedule):
    assert max(run_ranks(2, special_stages, schedule)) < EXACT


def in_place() -> float:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Identity())]
    whole, (x, y) = nn.Sequential(nn.Linear(6, 6), *layers).double(), batch(7)
    pipeline = pipeline_of(whole, 3, cuts=[4])  # the second stage begins with a layer that changes its input
    loss = pipeline.step(x, y, everywhere=True)
    return max(abs(loss - alone(whole, x, y)), distance(pipeline, whole))


def test_stages_that_change_their_input_in_place():
    assert max(run_ranks(2, in_place)) < EXACT


def tied_ends(m: int) -> float:
    torch.manual_seed(0)
    embedding, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embedding.weight
    whole = nn.Sequential(embedding, nn.Linear(6, 6), nn.LayerNorm(6), head).double()
    mine = copy.deepcopy(whole)
    with torch.no_grad():
        mine[0].weight += dist.get_rank()  # the last rank's copy becomes the first one's
    pipeline, worst = Pipeline(mine, m), 0.0
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(11, (7,), generator=generator), torch.randint(11, (7,), generator=generator)
        loss = pipeline.step(x, y, everywhere=True)
        worst = max(worst, abs(loss - alone(whole, x, y, nn.functional.cross_entropy)), distance(pipeline, whole))
    return worst


def test_tied_embeddings():
    assert max(run_ranks(2, tied_ends, 3)) < EXACT


def repeated(kind: str) -> float:
    """One module in several places: an activation, and a block with weights, on one rank and on several."""
    torch.manual_seed(0)
    block, act = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Tanh()
    whole = nn.Sequential(nn.Linear(6, 6), act, block, act, block, block, nn.Linear(6, 6)).double()
    mine = copy.deepcopy(whole)
    layers = {
        "Sequential": mine,
        "ModuleList": nn.ModuleList(mine._modules.values()),
        "list": [*mine._modules.values()],
    }
    pipeline, worst = Pipeline(layers[kind], 2, loss=nn.functional.mse_loss, cuts=[3]), 0.0
    for step in range(2):
        x, y = batch(5, seed=step)
        loss = pipeline.step(x, y, everywhere=True)
        worst = max(worst, abs(loss - alone(whole, x, y)), distance(pipeline, whole))
    return worst


@pytest.mark.parametrize("kind", ["Sequential", "ModuleList", "list"])
def test_a_module_in_several_places(kind):
    assert max(run_ranks(2, repeated, kind)) < EXACT


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return token_loss(logits[:, :-1], labels[:, 1:])


IGNORED = {  # loss, count; how many labels each row counts
    "unequal": (token_loss, {}, (1, 2, 6, 6)),
    "a micro-batch without any": (token_loss, {}, (0, 0, 3, 6)),
    "shifted": (shifted_loss, {"count": lambda labels: int((labels[:, 1:] != -100).sum())}, (2, 3, 6, 6)),
    "evaluated": (token_loss, {}, (0, 1, 0, 6)),
}


def ignored_labels(loss, settings: dict, counts: tuple[int, ...]) -> float:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11)).double()
    pipeline = Pipeline(copy.deepcopy(whole), 2, loss=loss, **settings)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(11, (4, 6), generator=generator) for _ in range(2))
    for row, counted in zip(y, counts, strict=True):
        row[counted:] = -100
    found = [pipeline.evaluate(x, y, everywhere=True)]
    assert all(each.grad is None for each in pipeline.parameters())
    found.append(pipeline.step(x, y, everywhere=True))
    expected = alone(whole, x, y, loss)
    return max(distance(pipeline, whole), *(abs(each - expected) for each in found))


@pytest.mark.parametrize("case", IGNORED)
def test_labels_that_are_ignored(case):
    assert max(run_ranks(2, ignored_labels, *IGNORED[case])) < EXACT


def own_rows() -> float:
    """A schedule that no generator makes: the micro-batches in the other order, stages back and forth."""
    rows = [
        [Action("F", 0, 1), Action("F", 0, 0), Action("F", 3, 1), Action("F", 3, 0)],
        [Action("F", 1, 1), Action("F", 2, 1), Action("F", 1, 0), Action("F", 2, 0)],
    ]
    rows = [row + [Action("B", stage, micro) for _, stage, micro in reversed(row)] for row in rows]
    whole = build()
    pipeline = pipeline_of(whole, 2, rows)
    x, y = batch(5)
    assert abs(pipeline.step(x, y, everywhere=True) - alone(whole, x, y)) < EXACT
    return distance(pipeline, whole)


def test_rows_of_ones_own():
    assert max(run_ranks(2, own_rows)) < EXACT


def whole_names() -> None:
    whole = build()
    pipeline = pipeline_of(whole, 2, "interleaved")
    state = whole.state_dict()
    mine = pipeline.state_dict()
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, list(mine))
    assert sorted(name for part in parts for name in part) == sorted(state)
    assert all(torch.equal(mine[name], state[name]) for name in mine)
    assert [name for name, _ in pipeline.named_parameters()] == list(mine)
    pipeline.load_state_dict({name: each + 1 for name, each in state.items()})
    assert all(torch.equal(each, state[name] + 1) for name, each in pipeline.named_parameters())
    last = dist.get_rank() == 1
    for wrong, expected in (
        (
            {name: each for name, each in state.items() if name != "7.down.weight"},
            "rank 1: .*'7.down.weight' is missing or has another shape",
        ),
        (state | {"0.up.bias": torch.zeros(1)}, "rank 0: .*'0.up.bias' is missing or has another shape"),
    ):
        given = wrong if last or "0.up" in expected else state
        said = message_of(lambda given=given: pipeline.load_state_dict(given))
        assert re.search(expected, said), said


def test_state_under_the_names_of_the_whole_model():
    run_ranks(2, whole_names)


def a_decoder() -> float:
    from scratch_ddp.benchmark.steps import build_llama

    sizes = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 16, "max_position_embeddings": 16}
    whole = build_llama(dtype=torch.float64, num_hidden_layers=3, **sizes, tie_word_embeddings=True)

    def loss(logits, labels):
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    pipeline = Pipeline(copy.deepcopy(whole), 2, "zb_h1", loss)
    ids = torch.randint(32, (4, 7), generator=torch.Generator().manual_seed(0))
    found = pipeline.step(ids, ids, everywhere=True)
    assert set(pipeline.state_dict()) <= set(whole.state_dict())
    expected = alone(lambda ids: whole(input_ids=ids).logits, ids, ids, loss)
    return max(distance(pipeline, whole), abs(found - expected))


@pytest.mark.parametrize("p", [1, 2, 4])
def test_a_transformers_decoder_with_tied_embeddings(p):
    pytest.importorskip("transformers.models.llama.modeling_llama")  # before the fork: it takes seconds
    assert max(run_ranks(p, a_decoder)) < EXACT
