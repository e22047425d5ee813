"""One process and n ranks train alike, whatever the shares are; and there is something to learn."""

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scratch_ddp.ddp import FlatDDP, SimpleDistributedDataParallelism
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.training import __main__ as command
from scratch_ddp.training.data import Batches, load_pairs, sentences, tokenise
from scratch_ddp.training.loop import (
    accumulate,
    check_ranks,
    global_mean,
    pair_loss_sum,
    seed_everything,
    train,
    warm_up_then_fall,
    windows,
)
from scratch_ddp.training.models import build_small
from scratch_ddp.training.pairs import make_pairs
from tests.ddp.cases import STRATEGIES, bits, calls, gathered
from tests.ranks import run_ranks
from tests.training.cases import PAIRS, TINY


def run(strategy, dtype, items, batch_size, epochs=1, accumulation=1, sizes=None, together=True) -> dict:
    """Train the small model on the first `items` pairs; on all ranks together, or in one process."""
    seed_everything(0)
    model, tokenizer = build_small(dtype=dtype, **(sizes or {}))
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    rows = {name: column[:items] for name, column in PAIRS["train"].items()}
    batches = Batches(tokenise(rows, tokenizer), batch_size, tokenizer.pad_token_id, rank, world_size, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digests = []
    optimizer.register_step_post_hook(lambda *_: digests.append(bits(model)))
    history = train(
        strategy(model) if together else model,
        batches,
        epochs,
        accumulation=accumulation,
        optimizer=optimizer,
        validation=batches,
    )
    losses = history.of_all_ranks().mean(1) if together else torch.tensor(history.losses, dtype=torch.float64)
    weights = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    return {"losses": losses, "weights": weights, "digests": digests, "history": history}


def assert_alike(results: list[dict], alone: dict, relative: float) -> None:
    assert all(result["digests"] == results[0]["digests"] for result in results), "replicas differ after some step"
    assert len(results[0]["digests"]) == len(alone["digests"])
    for result in results:
        torch.testing.assert_close(result["losses"], alone["losses"], rtol=relative, atol=0)
        assert result["history"].scores == alone["history"].scores
        for name, weight in result["weights"].items():
            distance = (weight - alone["weights"][name]).norm() / alone["weights"][name].norm()
            assert distance <= relative, f"{name}: {distance:.2e}"


@pytest.mark.parametrize(
    "dtype, steps, relative", [(torch.float64, 50, 1e-12), (torch.float32, 5, 1e-5)], ids=["double", "single"]
)
def test_steps_equal_one_process(dtype, steps, relative):
    (alone,) = run_ranks(1, run, None, dtype, 16 * steps, 16, 1, 1, None, False)
    assert len(alone["losses"]) == steps
    for world_size, strategy in ((2, SimpleDistributedDataParallelism), (4, FlatDDP)):
        assert_alike(run_ranks(world_size, run, strategy, dtype, 16 * steps, 16), alone, relative)


@pytest.mark.parametrize("strategy", [*STRATEGIES, DistributedDataParallel], ids=lambda strategy: strategy.__name__)
@pytest.mark.parametrize("items", [37, 33], ids=["uneven", "three ranks without items"])
def test_unequal_shares_equal_one_process(strategy, items):
    """The last batch has 5 items, or 1, for 4 ranks; windows of 3 micro-batches leave a remainder of 2."""
    (alone,) = run_ranks(1, run, None, torch.float64, items, 24, 2, 1, TINY, False)
    results = run_ranks(4, run, strategy, torch.float64, items, 8, 2, 3, TINY)
    assert_alike(results, alone, 1e-12)


def collectives_of_an_epoch(strategy, accumulation: int) -> dict:
    seed_everything(0)
    model, tokenizer = build_small(**TINY)
    rows = {name: column[:28] for name, column in PAIRS["train"].items()}
    batches = Batches(tokenise(rows, tokenizer), 4, 0, dist.get_rank(), dist.get_world_size())
    wrapped = strategy(model)
    with traffic() as counts:
        train(wrapped, batches, accumulation=accumulation)
    return calls(counts) | {"parameters": len(list(model.parameters()))}


@pytest.mark.parametrize("accumulation, steps", [(1, 7), (3, 3), (9, 1)])
def test_one_synchronisation_a_step(accumulation, steps):
    for counts in run_ranks(2, collectives_of_an_epoch, SimpleDistributedDataParallelism, accumulation):
        assert counts["all_reduce"] == steps * counts["parameters"]
    for counts in run_ranks(2, collectives_of_an_epoch, FlatDDP, accumulation):
        assert (counts["all_reduce"], counts["broadcast"]) == (steps, 0)


def learn() -> tuple:
    seed_everything(0)
    pairs = load_pairs("built-in")
    model, tokenizer = build_small(texts=sentences(pairs["train"]))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train_batches, validation = (
        Batches(tokenise(pairs[split], tokenizer), 16, tokenizer.pad_token_id, rank, world_size, seed=seed)
        for split, seed in (("train", 0), ("validation", None))
    )
    lines = []
    began = time.monotonic()
    history = train(
        SimpleDistributedDataParallelism(model), train_batches, 4, report=lines.append, validation=validation
    )
    return history.scores[-1], history.epoch_losses, lines, time.monotonic() - began


def test_there_is_something_to_learn():
    (first, losses, lines, seconds), (second, *_) = run_ranks(2, learn, timeout=180)
    assert first == second
    assert first.accuracy >= first.majority + 0.1, f"only {first}"
    assert losses[-1] < 0.8 * losses[0]
    assert seconds < 90
    assert len(lines) == 4 and re.fullmatch(r"epoch 4: loss 0\.\d{4}, validation accuracy 0\.\d{3}, F1 .*", lines[-1])


def token_mean() -> tuple:
    """Ranks with 1, 2, 3, 4 tokens: the gradient of the mean over all ten."""
    weight = torch.ones(1, requires_grad=True)
    rank = dist.get_rank()
    mine = torch.arange(10.0)[rank * (rank + 1) // 2 :][: rank + 1]
    loss = global_mean((weight * mine).sum(), len(mine))
    loss.backward()
    return sum(gathered(weight.grad.item())) / dist.get_world_size(), sum(gathered(loss.item())) / dist.get_world_size()


def test_a_mean_over_unequal_numbers_of_tokens():
    for gradient, loss in run_ranks(4, token_mean):
        assert gradient == loss == pytest.approx(4.5)


def test_windows_keep_the_remainder():
    assert list(windows(iter("abcdefg"), 3)) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert list(windows(iter(""), 3)) == []


def test_the_learning_rate_rises_and_falls():
    rates = [warm_up_then_fall(step, 10, 0.2) for step in range(11)]
    assert rates[:3] == [0.5, 1.0, 1.0] and rates[-1] == 0
    assert all(earlier > later for earlier, later in zip(rates[2:], rates[3:], strict=False))
    assert all(0 < warm_up_then_fall(step, steps, 0.1) <= 1 for steps in (1, 2, 3) for step in range(steps))


def unwrapped_on_two_ranks() -> None:
    model, tokenizer = build_small(**TINY)
    batches = Batches(tokenise(make_pairs({"train": 8})["train"], tokenizer), 4, 0, dist.get_rank(), 2)
    with pytest.raises(ValueError, match="shared over 2 ranks, but 1 train the model: wrap the model"):
        train(model, batches)
    for strategy in (FlatDDP, DistributedDataParallel):
        check_ranks(strategy(copy.deepcopy(model)), batches)
        with pytest.raises(ValueError, match="shared over 1 ranks, but 2 train"):
            check_ranks(strategy(copy.deepcopy(model)), Batches(batches.items, 4, 0))


def test_shares_that_do_not_fit_the_model_are_refused():
    run_ranks(2, unwrapped_on_two_ranks)


def test_a_window_of_one_micro_batch_needs_no_strategy():
    model, tokenizer = build_small(dtype=torch.float64, **TINY)
    (batch,) = Batches(tokenise(make_pairs({"train": 8})["train"], tokenizer), 8, 0).epoch()
    loss = accumulate(model, [batch], pair_loss_sum, 1)
    expected = torch.nn.functional.cross_entropy(model(**batch.inputs).logits, batch.labels)
    torch.testing.assert_close(loss, expected.detach())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_progress_is_shown_where_it_is_wanted(monkeypatch, capfd):
    model, tokenizer = build_small(**TINY)
    batches = Batches(tokenise(make_pairs({"train": 8})["train"], tokenizer), 4, 0)
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "1")
    train(model, batches)
    assert "2/2" in capfd.readouterr().err
    monkeypatch.setenv("SCRATCH_DDP_PROGRESS", "0")
    train(model, batches)
    assert capfd.readouterr() == ("", "")


def test_the_same_lines_under_python_and_torchrun():
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }
    arguments = [
        "-m",
        "scratch_ddp.training",
        "--data",
        "built-in",
        "--model",
        "built-in",
        "--epochs",
        "1",
        "--device",
        "cpu",
    ]
    arguments += ["--accumulation", "2", "--batch-size", "8"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = []
    for launcher, strategy in (([], []), (torchrun, ["--strategy", "bucketed"])):
        command = [sys.executable, *launcher, *arguments, *strategy]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert ran.returncode == 0, ran.stderr
        outputs.append(re.sub(r"in [\d.]+ s", "in … s", ran.stdout).splitlines())
    assert outputs[0][-1].startswith("1 process on cpu: 50 steps in … s; test accuracy")
    assert outputs[1][-1].startswith("2 ranks on cpu: 50 steps")
    assert outputs[1].pop(0) == "2 ranks on 1 host, cpu"
    assert outputs[0][:-1] == outputs[1][:-1] and len(outputs[0]) == 4
    assert outputs[0][-1].split(";")[1] == outputs[1][-1].split(";")[1]


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--accumulation", "0", "a whole number, 1 or more, is needed, not '0'"),
        ("--epochs", "0", "a whole number, 1 or more, is needed, not '0'"),
        ("--batch-size", "-4", "a whole number, 1 or more, is needed, not '-4'"),
        ("--max-length", "1", "a whole number, 4 or more, is needed, not '1'"),
        ("--lr", "nan", "a number, 0 or more, is needed, not 'nan'"),
        ("--strategy", "none", "choose from"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded(option, value, says, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training", f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--data", "nowhere"], ["--batch-size", "3"]])
def test_what_does_not_fit_is_one_sentence_without_a_traceback(options):
    def on_rank():
        sys.argv = ["training", "--data=built-in", "--model=built-in", "--device=cpu", *options]
        os.environ["RANK"] = str(dist.get_rank())
        command.dist = SimpleNamespace(  # the ranks exist already
            init_process_group=lambda _: None,
            destroy_process_group=lambda: None,
            get_rank=dist.get_rank,
            get_world_size=dist.get_world_size,
        )
        try:
            command.main()
        except SystemExit as ended:
            return ended.code

    first, second = run_ranks(2, on_rank)
    assert first.startswith("scratch_ddp.training: ") and "\n" not in first and second == 1


def lines_of(strategy: str) -> list[str]:
    """What the command prints on rank 0 of two, but for the time."""
    sys.argv = ["training", "--data=built-in", "--model=built-in", "--device=cpu", "--epochs=1", "--max-length=16"]
    sys.argv += ["--strategy", strategy]
    options, printed = command.arguments(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        command.run(options, torch.device("cpu"), dist.get_rank(), dist.get_world_size())
    return re.sub(r"in [\d.]+ s", "in … s", printed.getvalue()).splitlines()


def test_zero_and_fsdp_train_as_ddp_does():
    bucketed, *others = [run_ranks(2, lines_of, strategy)[0] for strategy in ("bucketed", "zero", "fsdp")]
    assert bucketed[-1].startswith("2 ranks") and others == [bucketed, bucketed]


def test_a_learning_rate_of_zero_is_no_default(monkeypatch):
    def train(*_, optimizer, **__):
        raise ValueError(f"the learning rate is {optimizer.param_groups[0]['lr']}")

    monkeypatch.setattr(sys, "argv", ["training", "--data=built-in", "--model=built-in", "--device=cpu", "--lr=0"])
    monkeypatch.setattr(command, "train", train)
    with pytest.raises(SystemExit, match="the learning rate is 0.0"):
        command.main()
