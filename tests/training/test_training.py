"""One process and n ranks train and evaluate alike, whatever the shares are; and there is something to learn."""

import contextlib
import copy
import io
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.ddp import FlatDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.training import __main__ as command
from scratch_ddp.training.data import Batches, load_pairs, sentences, tokenise
from scratch_ddp.training.loop import Score, evaluate, score, train, warm_up_then_fall
from scratch_ddp.training.models import build_small
from scratch_ddp.training.pairs import make_pairs
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


@pytest.mark.parametrize(("accumulation", "steps"), [(1, 7), (3, 3), (9, 1)])
def test_one_synchronisation_a_step(accumulation, steps):
    for counts in run_ranks(2, collectives_of_an_epoch, accumulation):
        assert (counts["all_reduce"], counts["broadcast"]) == (steps, 0)


def learn() -> tuple:
    torch.manual_seed(0)
    pairs = load_pairs("built-in")
    model, tokenizer = build_small(texts=sentences(pairs["train"]))
    training, validation = (
        Batches(tokenise(pairs[split], tokenizer), 16, tokenizer.pad_token_id, dist.get_rank(), 2, seed=seed)
        for split, seed in (("train", 0), ("validation", None))
    )
    lines = []
    history = train(SimpleDistributedDataParallelism(model), training, 4, report=lines.append, validation=validation)
    return history.scores[-1], history.epoch_losses, lines


def test_there_is_something_to_learn():
    (first, losses, lines), (second, *_) = run_ranks(2, learn, timeout=180)
    assert first == second and first.accuracy >= first.majority + 0.1, f"only {first}"
    assert losses[-1] < 0.8 * losses[0]
    assert len(lines) == 4 and re.fullmatch(r"epoch 4: loss 0\.\d{4}, validation accuracy 0\.\d{3}, F1 .*", lines[-1])


def evaluate_shares(items: int, size: int) -> Score:
    torch.manual_seed(0)
    model, tokenizer = build_small(**TINY)
    rows = {name: column[:items] for name, column in PAIRS["test"].items()}
    result = evaluate(
        model.train(), Batches(tokenise(rows, tokenizer), size, 0, dist.get_rank(), dist.get_world_size(), "contiguous")
    )
    assert model.training, "left as it was"
    return result


def test_evaluation_counts_each_item_once():
    (alone,) = run_ranks(1, evaluate_shares, 17, 8)
    assert run_ranks(4, evaluate_shares, 17, 8) == [alone] * 4 and alone.items == 17


def test_the_score_of_a_table():
    assert score(torch.tensor([[3, 1], [2, 4]])) == Score(0.7, 8 / 11, 0.6, 10)
    assert score(torch.tensor([[5, 0], [2, 0]])) == Score(5 / 7, 0.0, 5 / 7, 7)


def test_the_learning_rate_rises_and_falls():
    rates = [warm_up_then_fall(step, 20) for step in range(21)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == 0
    assert all(earlier > later for earlier, later in zip(rates[2:], rates[3:], strict=False))
    assert all(0 < warm_up_then_fall(step, steps) <= 1 for steps in (1, 2, 3) for step in range(steps))


def unwrapped_on_two_ranks() -> None:
    model, tokenizer = build_small(**TINY)
    batches = Batches(tokenise(make_pairs({"train": 8})["train"], tokenizer), 4, 0, dist.get_rank(), 2)
    with pytest.raises(ValueError, match="shared over 2 ranks, but 1 train the model: wrap the model"):
        train(model, batches)
    for strategy in (FlatDDP, DistributedDataParallel):
        with pytest.raises(ValueError, match="shared over 1 ranks, but 2 train"):
            train(strategy(copy.deepcopy(model)), Batches(batches.items, 4, 0))


def test_shares_that_do_not_fit_the_model_are_refused():
    run_ranks(2, unwrapped_on_two_ranks)


def test_the_same_lines_under_python_and_torchrun():
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    arguments = ["-m", "scratch_ddp.training", "--epochs=1", "--device=cpu", "--accumulation=2", "--batch-size=8"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = []
    for launcher, strategy in (([], []), (torchrun, ["--strategy", "bucketed"])):
        ran = subprocess.run(
            [sys.executable, *launcher, *arguments, *strategy],
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stderr
        outputs.append(re.sub(r"in [\d.]+ s", "in … s", ran.stdout).splitlines())
    assert outputs[0][-1].startswith("1 process on cpu: 50 steps in … s; test accuracy")
    assert outputs[1][-1].startswith("2 ranks on cpu: 50 steps")
    assert outputs[1].pop(0) == "2 ranks on 1 host, cpu"
    assert outputs[0][:-1] == outputs[1][:-1] and len(outputs[0]) == 4
    assert outputs[0][-1].split(";")[1] == outputs[1][-1].split(";")[1]


def on_a_rank(*options: str) -> tuple[list[str], object]:
    """What the command prints on this rank, but for the time, and how it ends."""
    sys.argv = ["training", "--device=cpu", "--epochs=1", *options]
    command.ranks = lambda *_: contextlib.nullcontext((dist.get_rank(), dist.get_world_size()))
    printed, ended = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            command.main()
        except SystemExit as end:
            ended = end.code
    return re.sub(r"in [\d.]+ s", "in … s", printed.getvalue()).splitlines(), ended


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--data=/nowhere", "no pairs can be loaded from '/nowhere'"),
        ("--batch-size=3", "a global batch of 3 can't be shared evenly by 2 ranks"),
        ("--max-length=3", "max_length must be 4 or more"),
    ],
)
def test_what_does_not_fit_is_one_sentence_without_a_traceback(option, says):
    (_, first), (_, second) = run_ranks(2, on_a_rank, option)
    assert first.startswith("scratch_ddp.training: ") and "\n" not in first and says in first and second == 1


@pytest.mark.parametrize("option", ["--accumulation=0", "--batch-size=-4", "--every=0", "--timeout=soon"])
def test_numbers_that_make_no_sense_are_refused_before_anything_is_loaded(option, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training", option])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "a whole number, 1 or more, is needed, not" in capsys.readouterr().err
