"""Every item counts once, on however many ranks; accuracy and F1 are what they are defined to be."""

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.training.data import Batches, tokenise
from scratch_ddp.training.evaluation import Score, evaluate, score
from scratch_ddp.training.loop import seed_everything
from scratch_ddp.training.models import build_small
from tests.ranks import run_ranks
from tests.training.cases import PAIRS, TINY


def evaluate_shares(items: int, size: int) -> Score:
    seed_everything(0)
    model, tokenizer = build_small(**TINY)
    rows = {name: column[:items] for name, column in PAIRS["test"].items()}
    batches = Batches(tokenise(rows, tokenizer), size, 0, dist.get_rank(), dist.get_world_size(), "contiguous")
    model.train()
    result = evaluate(model, batches)
    assert model.training, "left as it was"
    return result


@pytest.mark.parametrize("items", [17, 64])
def test_evaluation_counts_each_item_once(items):
    (alone,) = run_ranks(1, evaluate_shares, items, 8)
    for world_size in (2, 4):
        assert run_ranks(world_size, evaluate_shares, items, 8) == [alone] * world_size
    assert alone.items == items


def test_score():
    assert score(torch.tensor([[3, 1], [2, 4]])) == Score(0.7, 8 / 11, 0.6, 10)
    assert score(torch.tensor([[5, 0], [2, 0]])) == Score(5 / 7, 0.0, 5 / 7, 7)


def test_score_agrees_with_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    labels, predictions = torch.randint(2, (2, 50), generator=torch.Generator().manual_seed(0)).tolist()
    ours = score(torch.tensor(metrics.confusion_matrix(labels, predictions)))
    assert ours.accuracy == pytest.approx(metrics.accuracy_score(labels, predictions))
    assert ours.f1 == pytest.approx(metrics.f1_score(labels, predictions))
