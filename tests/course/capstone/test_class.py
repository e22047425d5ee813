"""The capstone's judge of a class: it earns everything or is refused by the right criterion, and nothing hangs."""

from pathlib import Path

import pytest

from scratch_ddp.commands import grade as grading
from scratch_ddp.course.capstone import real_loop, trials
from scratch_ddp.course.capstone.torchrun import Ended

REFERENCE = Path(trials.__file__).with_name("reference_class.py")
SEND = "        dist.all_reduce(flat)\n"
WRONG_CLASSES = {  # name: (edits of the reference, the criteria that fail with these words); all others hold
    "none: the reference in other words, with a message for each MiB": (
        {SEND: "        [work.wait() for work in [dist.all_reduce(p, async_op=True) for p in flat.split(2**18)]]\n"},
        {},
    ),
    "buffers stay different": (
        {"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        {"start": "Rank 1, each rank has a model of its own: after MyDDP(model): 'scale' is ["},
    ),
    "a sum": (
        {"        flat /= self.world_size  # before the sum, which could overflow in half precision\n": ""},
        dict.fromkeys(("value", "accumulation", "unused"), "the gradient of '"),
    ),
    "each rank adds up in an order of its own": (
        {
            SEND: """\
        everyones = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(everyones, flat)
        flat = sum(everyones[dist.get_rank():] + everyones[: dist.get_rank()])
"""
        },
        {"replicas": "has not the same bits on all ranks", "bytes": "", "frozen": "the number of bytes", "memory": ""},
    ),
    "a call for each parameter": (
        {SEND: "        for part in flat.split([p.numel() for p in present]):\n            dist.all_reduce(part)\n"},
        {"calls": "the number of calls for 3.9 MiB of gradients is 81, should be 6"},
    ),
    "keeps a copy": (
        {SEND: "        self.last = flat.clone()\n" + SEND},
        {"memory": "the peak, in further copies of the gradients, is "},
    ),
    "always sends": (
        {"        if not self.synchronises:\n            return\n": ""},
        {"accumulation": "the number of calls inside no_sync() after an inner no_sync() has ended is 2, should be 0"},
    ),
    "an exception leaves it switched off": (
        {
            "        try:\n            yield\n        finally:\n            self.synchronises = before\n": (
                "        yield\n        self.synchronises = before\n"
            )
        },
        {"accumulation": "one outside after an exception inside no_sync(): the gradient of"},
    ),
    "an inner no_sync switches it on": (
        {"            self.synchronises = before": "            self.synchronises = True"},
        {"accumulation": "the number of calls inside no_sync() after an inner no_sync() has ended is 2, should be 0"},
    ),
    "skips what this rank has not used": (
        {
            "zip(trained, used.tolist(), strict=True) if anywhere]": "zip(trained, used.tolist(), strict=True)\n"
            "                if parameter.grad is not None]"
        },
        {"unused": "step 1: the gradient of 'heads.0.weight' is"},
    ),
    "zeros where no rank has a gradient": (
        {"used.tolist(), strict=True) if anywhere]": "used.tolist(), strict=True)]"},
        {"unused": "should be None"},
    ),
    "frozen parameters travel too": (
        {
            "[parameter for parameter in self.module.parameters() if parameter.requires_grad]": (
                "list(self.module.parameters())"
            ),
            "used.tolist(), strict=True) if anywhere]": (
                "used.tolist(), strict=True) if anywhere or not parameter.requires_grad]"
            ),
        },
        {"frozen": "0.weight has a gradient: that is True, should be False"},
    ),
}
ENDED = {  # what ends every criterion: (edits, words of "value")
    "rank 0 makes one call more": (
        {SEND: SEND + "        if dist.get_rank() == 0:\n            dist.barrier()\n"},
        "`dist.barrier()`",
    ),
    "one rank raises": (
        {SEND: "        if dist.get_rank() == 2:\n            raise KeyError('lost')\n" + SEND},
        "Rank 2 raised KeyError: 'lost' (line 42, `raise KeyError('lost')`)",
    ),
}
REFUSED = {  # file: (criteria, words)
    "": (trials.PROMISES, "my_ddp.py defines no class MyDDP yet"),
    "def MyDDP(:": (trials.PROMISES, "my_ddp.py can't be imported: SyntaxError"),
    "from torch import nn\nclass MyDDP(nn.Module):\n    def forward(self): pass": (
        trials.PROMISES,
        "MyDDP has no no_sync()",
    ),
}


def edited(folder: Path, edits: dict[str, str]) -> Path:
    source = REFERENCE.read_text()
    for old, new in edits.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    path = folder / "my_ddp.py"
    path.write_text(source)
    return path.resolve()


def test_the_reference_earns_everything_also_under_torchrun_and_a_killed_rank(tmp_path, capsys):
    assert grading.main([str(edited(tmp_path, {}))]) == 0
    printed = capsys.readouterr().out
    assert f"{len(trials.PROMISES)} of {len(trials.PROMISES)} criteria hold." in printed and "✗" not in printed


@pytest.mark.parametrize("name", WRONG_CLASSES)
def test_a_wrong_class_is_refused_by_the_right_criterion(name, tmp_path):
    edits, expected = WRONG_CLASSES[name]
    found = trials.on_ranks(edited(tmp_path, edits))
    assert {each for each, complaint in found.items() if complaint} == set(expected), found
    assert all(words in found[each] for each, words in expected.items()), found


@pytest.mark.parametrize("name", ENDED)
def test_what_stops_a_rank_is_named_with_its_line(name, tmp_path):
    edits, words = ENDED[name]
    assert words in trials.on_ranks(edited(tmp_path, edits), 1.5, [("value", "replicas")])["value"]


@pytest.mark.parametrize("source, refused", REFUSED.items())
def test_a_file_without_the_class_fails_every_criterion(source, refused, tmp_path):
    path = tmp_path / "my_ddp.py"
    path.write_text(source)
    names, says = refused
    found = trials.judge(path)
    assert list(found) == list(names) and all(says in complaint for complaint in found.values())


@pytest.mark.parametrize("source", ["from scratch_ddp import BucketedDDP as MyDDP", "MyDDP = DistributedDataParallel"])
def test_borrowed_work_is_not_the_learners_own(source, tmp_path):
    path = tmp_path / "my_ddp.py"
    path.write_text(f"from torch.nn.parallel import DistributedDataParallel\n{source}\nMyDDP.sync_gradients = print\n")
    assert trials.looked_at(path)[1].startswith("my_ddp.py uses ")


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
