"""One process and n ranks train and evaluate alike, whatever the shares are; and there is something to learn."""

import contextlib
import copy
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.ddp import FlatDDP
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.training import __main__ as command
from scratch_ddp.training.data import Batches, tokenise
from scratch_ddp.training.loop import Score, score, train, warm_up_then_fall
from scratch_ddp.training.models import build_small
from tests.ddp.cases import STRATEGIES, bits, calls
from tests.ranks import run_ranks
from tests.training.cases import PAIRS, TINY


def run(strategy, items, batch_size, accumulation=1) -> dict:
    """Train a small model on the first `items` pairs, on all ranks together, or in one process without a strategy."""
    torch.manual_seed(0)
    model, tokenizer = build_small(dtype=torch.float64, **TINY)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if strategy else (0, 1)
    rows = {name: column[:items] for name, column in PAIRS["train"].items()}
    batches = Batches(tokenise(rows, tokenizer), batch_size, tokenizer.pad_token_id, rank, world_size, seed=0)
    optimizer, digests = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    optimizer.register_step_post_hook(lambda *_: digests.append(bits(model)))
    wrapped = strategy(model) if strategy else model
    history = train(wrapped, batches, 2, accumulation=accumulation, optimizer=optimizer, validation=batches)
    losses = history.of_all_ranks().mean(1)
    return {"losses": losses, "weights": model.state_dict(), "digests": digests, "scores": history.scores}


@pytest.mark.parametrize("strategy", [*STRATEGIES, DistributedDataParallel], ids=lambda strategy: strategy.__name__)
@pytest.mark.parametrize("items", [37, 33], ids=["uneven", "three ranks without items"])
def test_unequal_shares_equal_one_process(strategy, items):
    """The last batch has 5 items, or 1, for 4 ranks; windows of 3 micro-batches leave a remainder of 2."""
    (alone,) = run_ranks(1, run, None, items, 24)
    results = run_ranks(4, run, strategy, items, 8, 3)
    assert all(result["digests"] == results[0]["digests"] for result in results), "replicas differ after some step"
    assert len(results[0]["digests"]) == len(alone["digests"]) and results[0]["scores"] == alone["scores"]
    torch.testing.assert_close(results[0]["losses"], alone["losses"], rtol=1e-12, atol=0)
    torch.testing.assert_close(results[0]["weights"], alone["weights"], rtol=1e-9, atol=1e-12)


def collectives_of_an_epoch(accumulation: int) -> dict:
    model, tokenizer = build_small(**TINY)
    rows = {name: column[:28] for name, column in PAIRS["train"].items()}
    wrapped = FlatDDP(model)
    with traffic() as counts:
        train(wrapped, Batches(tokenise(rows, tokenizer), 4, 0, dist.get_rank(), 2), accumulation=accumulation)
    return calls(counts)


def test_one_synchronisation_a_step():
    for counts in run_ranks(2, collectives_of_an_epoch, 3):
        assert (counts["all_reduce"], counts["broadcast"]) == (3, 0)


def test_the_score_of_a_table():
    assert score(torch.tensor([[3, 1], [2, 4]])) == Score(0.7, 8 / 11, 0.6, 10)
    assert score(torch.tensor([[5, 0], [2, 0]])) == Score(5 / 7, 0.0, 5 / 7, 7)


def test_the_learning_rate_rises_and_falls():
    rates = [warm_up_then_fall(step, 20) for step in range(21)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == 0
    assert all(earlier > later for earlier, later in zip(rates[2:], rates[3:], strict=False))
    assert all(0 < warm_up_then_fall(step, steps) <= 1 for steps in (1, 2, 3) for step in range(steps))


def test_the_same_lines_under_python_and_torchrun():
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    arguments = ["-m", "scratch_ddp.training", "--epochs=1", "--device=cpu", "--accumulation=2", "--batch-size=8"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = []
    for launcher, strategy in (([], []), (torchrun, ["--strategy", "bucketed"])):
        line = [sys.executable, *launcher, *arguments, *strategy]
        ran = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)
        assert ran.returncode == 0, ran.stderr
        outputs.append(re.sub(r"in [\d.]+ s", "in … s", ran.stdout).splitlines())
    assert outputs[0][-1].startswith("1 process on cpu: 50 steps in … s; test accuracy")
    assert outputs[1][-1].startswith("2 ranks on cpu: 50 steps")
    assert outputs[1].pop(0) == "2 ranks on 1 host, cpu"
    assert outputs[0][:-1] == outputs[1][:-1] and len(outputs[0]) == 4
    assert outputs[0][-1].split(";")[1] == outputs[1][-1].split(";")[1]


def refused_on_a_rank() -> list:
    """How the command ends with options that do not fit."""
    command.ranks = lambda *_: contextlib.nullcontext((dist.get_rank(), dist.get_world_size()))
    ended = []
    for option in ("--data=/nowhere", "--batch-size=3", "--max-length=3"):
        sys.argv = ["training", "--device=cpu", option]
        with pytest.raises(SystemExit) as end:
            command.main()
        ended.append(end.value.code)
    model, tokenizer = build_small(**TINY)
    batches = Batches(tokenise({name: column[:8] for name, column in PAIRS["train"].items()}, tokenizer), 4, 0)
    for strategy in (FlatDDP, DistributedDataParallel):
        with pytest.raises(ValueError, match="shared over 1 ranks, but 2 train the model: wrap the model"):
            train(strategy(copy.deepcopy(model)), batches)
    return ended


def test_what_does_not_fit_is_one_sentence_without_a_traceback():
    says = ["can be loaded from '/nowhere'", "batch of 3 can't be shared evenly by 2 ranks", "must be 4 or more"]
    first, second = run_ranks(2, refused_on_a_rank)
    for sentence, piece in zip(first, says, strict=True):
        assert sentence.startswith("scratch_ddp.training: ") and "\n" not in sentence and piece in sentence
    assert second == [1, 1, 1]


@pytest.mark.parametrize("option", ["--accumulation=0", "--batch-size=-4", "--every=0", "--timeout=soon"])
def test_numbers_that_make_no_sense_are_refused_before_anything_is_loaded(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training", option])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "a whole number, 1 or more, is needed, not" in capsys.readouterr().err
