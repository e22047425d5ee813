"""One process and n ranks train and evaluate alike, whatever the shares are; and there is something to learn."""

import copy
import functools
import os
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.training import __main__ as command
from scratch_ddp.training import data
from scratch_ddp.training.data import Batches, tokenise
from scratch_ddp.training.loop import Score, score, train, warm_up_then_fall
from scratch_ddp.training.models import build_small
from tests.ddp.cases import STRATEGIES, bits
from tests.ranks import printed_under_torchrun, run_ranks
from tests.training.cases import PAIRS, TINY, run_command


@pytest.fixture(autouse=True)
def _few_pairs(monkeypatch):
    """What the command loads as built-in."""
    monkeypatch.setattr(data, "make_pairs", lambda: PAIRS)


@functools.cache
def start():
    """A model and a tokenizer, made before the ranks are forked."""
    return build_small(dtype=torch.float64, **TINY)


def run(strategy, items, batch_size, group=None) -> dict:
    """Train a small model on the first `items` pairs, on a group's ranks, or in one process without a strategy."""
    model, tokenizer = copy.deepcopy(start()[0]), start()[1]
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if strategy else (0, 1)
    rows = {name: column[:items] for name, column in PAIRS["train"].items()}
    batches = Batches(tokenise(rows, tokenizer), batch_size, tokenizer.pad_token_id, rank, world_size, seed=0)
    optimizer, digests = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    optimizer.register_step_post_hook(lambda *_: digests.append(bits(model)))
    wrapped = strategy(model) if strategy else model
    history = train(wrapped, batches, optimizer=optimizer, validation=batches)
    return {"history": history, "weights": model.state_dict(), "digests": digests}


def test_unequal_shares_equal_one_process():
    """With every strategy. The last batch has 5 items for 4 ranks, or 1, so that three ranks have none."""
    start()
    ways = [(strategy, items, 8) for strategy in (*STRATEGIES, DistributedDataParallel) for items in (37, 33)]
    ((uneven, single),) = run_ranks(1, lambda: [run(None, items, 8) for items in (37, 33)])
    everyones = run_ranks(4, lambda: [run(*way) for way in ways], timeout=120)
    for way, *results in zip(ways, *everyones, strict=True):
        alone = uneven if way[1] == 37 else single
        assert all(result["digests"] == results[0]["digests"] for result in results), f"replicas differ: {way}"
        assert all(result["history"] == results[0]["history"] for result in results), f"histories differ: {way}"
        assert len(results[0]["digests"]) == len(alone["digests"])
        assert results[0]["history"].scores == alone["history"].scores
        assert results[0]["history"].losses == pytest.approx(alone["history"].losses, rel=1e-12, abs=0)
        torch.testing.assert_close(results[0]["weights"], alone["weights"], rtol=1e-9, atol=1e-12)


def test_some_of_the_ranks_train_with_torchs_class():
    def on_two_of_three():
        group = dist.new_group([1, 2])
        strategy = functools.partial(DistributedDataParallel, process_group=group)
        return run(strategy, 8, 4, group)["history"] if dist.get_rank() else None

    start()
    _, first, second = run_ranks(3, on_two_of_three)
    assert first == second and len(first.losses) == 2


def test_the_score_of_a_table():
    assert score(torch.tensor([[3, 1], [2, 4]])) == Score(0.7, 8 / 11, 0.6, 10)


def test_the_learning_rate_rises_and_falls():
    rates = [warm_up_then_fall(step, 20) for step in range(21)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] == 0
    assert all(0 < warm_up_then_fall(step, steps) <= 1 for steps in (1, 2, 3) for step in range(steps))


def lines_on(ranks: int) -> list[list[str]]:
    """What the command prints on each rank, without times, as torchrun or (one rank) plain Python starts it."""

    def script():
        if ranks == 1:
            del os.environ["RANK"]
        sys.argv = ["training", "--epochs=1", "--device=cpu", "--batch-size=32", "--strategy=bucketed"]
        command.main()

    return [re.sub(r"in [\d.]+ s", "in … s", each).splitlines() for each in printed_under_torchrun(ranks, script)]


def test_the_same_lines_in_one_process_and_on_two_ranks():
    (alone,), (first, second) = lines_on(1), lines_on(2)
    assert alone[-1].startswith("1 process on cpu: 5 steps in … s; test accuracy") and len(alone) == 4
    assert first.pop(0) == "2 ranks on 1 host, cpu" and second == []
    assert first[-1].startswith("2 ranks on cpu: 5 steps")
    assert alone[:-1] == first[:-1] and alone[-1].split(";")[1] == first[-1].split(";")[1]


def refused_on_a_rank() -> list:
    """How the command ends with options that do not fit."""
    ended = [run_command(option)[0] for option in ("--data=/nowhere", "--batch-size=3")]
    model, tokenizer = start()
    batches = Batches(tokenise({name: column[:8] for name, column in PAIRS["train"].items()}, tokenizer), 4, 0)
    for strategy in (FlatDDP, DistributedDataParallel):
        with pytest.raises(ValueError, match="shared over 1 ranks, but 2 train the model: wrap the model"):
            train(strategy(copy.deepcopy(model)), batches)
    return ended


def test_what_does_not_fit_is_one_sentence_without_a_traceback():
    start()
    first, second = run_ranks(2, refused_on_a_rank)
    for sentence, piece in zip(first, ("/nowhere", "batch of 3 can't be shared evenly by 2 ranks"), strict=True):
        assert sentence.startswith("scratch_ddp.training: ") and "\n" not in sentence and piece in sentence
    assert second == [1, 1]


def test_numbers_that_make_no_sense_are_refused_before_anything_is_loaded(capsys):
    for option in ("--batch-size=-4", "--every=0", "--timeout=soon"):
        assert run_command(option)[0] == 2
        assert "a whole number, 1 or more, is needed, not" in capsys.readouterr().err
