"""The capstone's judge of a class: it earns everything or is refused by the right criterion, and nothing hangs."""

from pathlib import Path

import pytest

from scratch_ddp.commands import grade as grading
from scratch_ddp.course.capstone import real_loop, trials
from scratch_ddp.course.capstone.torchrun import Ended

REFERENCE = Path(trials.__file__).with_name("reference_class.py")
SEND = "        dist.all_reduce(flat)\n"
MEAN = "        flat /= self.world_size  # before the sum, which could overflow in half precision\n"
GATHERED = """\
        everyones = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(everyones, flat)
        flat = sum(everyones[dist.get_rank():] + everyones[: dist.get_rank()])
"""
EACH = "        for part in flat.split([p.numel() for p in present]):\n            dist.all_reduce(part)\n"
RESTORE = "        try:\n            yield\n        finally:\n            self.synchronises = before\n"
USED = "used.tolist(), strict=True) if anywhere]"
TRAINED = "[parameter for parameter in self.module.parameters() if parameter.requires_grad]"
INSIDE = "the number of calls inside no_sync() after an inner no_sync() has ended is 2, should be 0"

WRONG_CLASSES = {  # name: (edits of the reference, the criteria that fail with these words); all others hold
    "none: the reference in other words, with a message for each MiB": (
        {SEND: "        [work.wait() for work in [dist.all_reduce(p, async_op=True) for p in flat.split(2**18)]]\n"},
        {},
    ),
    "buffers stay different": (
        {"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        {"start": "Rank 1, each rank has a model of its own: after MyDDP(model): 'scale' is ["},
    ),
    "a sum": ({MEAN: ""}, dict.fromkeys(("value", "accumulation", "unused"), "the gradient of '")),
    "each rank adds up in an order of its own": (
        {SEND: GATHERED},
        {"replicas": "has not the same bits on all ranks", "bytes": "sent", "frozen": "sent", "memory": "copies"},
    ),
    "a call for each parameter": ({SEND: EACH}, {"calls": "calls for 3.9 MiB of gradients is 81, should be 6"}),
    "an exception leaves it switched off": (
        {RESTORE: "        yield\n        self.synchronises = before\n"},
        {"accumulation": "one outside after an exception inside no_sync(): the gradient of"},
    ),
    "an inner no_sync switches it on": (
        {"            self.synchronises = before": "            self.synchronises = True"},
        {"accumulation": INSIDE},
    ),
    "skips what this rank has not used": (
        {USED: "used.tolist(), strict=True) if parameter.grad is not None]"},
        {"unused": "step 1: the gradient of 'heads.0.weight' is"},
    ),
    "zeros where no rank has a gradient": ({USED: "used.tolist(), strict=True)]"}, {"unused": "should be None"}),
    "frozen parameters travel too": (
        {
            TRAINED: "list(self.module.parameters())",
            USED: "used.tolist(), strict=True) if anywhere or not parameter.requires_grad]",
        },
        {"frozen": "0.weight has a gradient: that is True, should be False"},
    ),
}
BARRIER = SEND + "        if dist.get_rank() == 0:\n            dist.barrier()\n"
RAISE = "        if dist.get_rank() == 2:\n            raise KeyError('lost')\n" + SEND
ENDED = {  # what is done in place of SEND, and ends every criterion: words of "value"
    BARRIER: "called barrier",
    RAISE: "Rank 2 raised KeyError: 'lost' (in line 42, `raise KeyError('lost')`)",
}
REFUSED = {  # file: words of every criterion
    "": "my_ddp.py defines no class MyDDP yet",
    "def MyDDP(:": "my_ddp.py can't be imported: SyntaxError",
}


def written(folder: Path, source: str) -> Path:
    path = folder.resolve() / "my_ddp.py"
    path.write_text(source)
    return path


def edited(source: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def test_the_reference_earns_everything_also_under_torchrun_and_a_killed_rank(tmp_path, capsys):
    assert grading.main([str(written(tmp_path, REFERENCE.read_text()))]) == 0
    printed = capsys.readouterr().out
    assert f"{len(trials.PROMISES)} of {len(trials.PROMISES)} criteria hold." in printed and "✗" not in printed


@pytest.mark.parametrize("name", WRONG_CLASSES)
def test_a_wrong_class_is_refused_by_the_right_criterion(name, tmp_path):
    edits, expected = WRONG_CLASSES[name]
    found = trials.on_ranks(written(tmp_path, edited(REFERENCE.read_text(), edits)))
    assert {each for each, complaint in found.items() if complaint} == set(expected), found
    assert all(words in found[each] for each, words in expected.items()), found


@pytest.mark.parametrize("mistake", ENDED, ids=["one call more", "raises"])
def test_what_stops_a_rank_is_named_with_its_line(mistake, tmp_path):
    path = written(tmp_path, edited(REFERENCE.read_text(), {SEND: mistake}))
    assert ENDED[mistake] in trials.on_ranks(path, 1.5, [("value", "replicas")])["value"]


@pytest.mark.parametrize("source", REFUSED)
def test_a_file_without_the_class_fails_every_criterion(source, tmp_path):
    found = trials.judge(written(tmp_path, source))
    assert list(found) == list(trials.PROMISES) and all(REFUSED[source] in words for words in found.values())


def test_borrowed_work_is_not_the_learners_own(tmp_path):
    path = written(tmp_path, "from scratch_ddp import BucketedDDP as MyDDP")
    assert trials.looked_at(path) == ("", "my_ddp.py uses MyDDP of scratch_ddp.ddp.bucketed")


def test_what_is_said_of_the_run_under_torchrun():
    losses = {step: {"loss": 1.0} for step in range(1, real_loop.STEPS + 1)}
    lost, resumed = "rank 1 raises ValueError: lost", Ended(0, ["resumed after step 4"])

    def said(*run):
        return list(real_loop.complaints(losses, *run).values())

    assert said(losses, True, resumed) == ["", ""]
    assert said({}, False, Ended(1, ["rank 0 waits at x", lost])) == [lost, "the run did not come so far"]
    assert said(losses, True, Ended(0, [])) == ["", "the run did not go on from its checkpoint"]
    assert said({1: {"loss": 1.0}}, True, resumed) == ["", "only 1 of 10 steps were made"]
    assert said(losses | {3: {"loss": 2.0}}, True, resumed)[0].startswith("step 3: loss 2.000000; one process has 1.0")
