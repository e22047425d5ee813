"""The capstone's judge of a class: it earns everything or is refused by the right criterion, and nothing hangs."""

import importlib
from pathlib import Path

from scratch_ddp.commands import grade as grading
from scratch_ddp.course.capstone import my_class, real_loop
from scratch_ddp.course.capstone.torchrun import Ended
from tests.course.answers import edited, on_ranks, read

REFERENCE = Path(my_class.__file__).with_name("reference_class.py")
MISTAKES = read("""
MyDDP
  ✓ the reference in other words, with a message for each MiB
    dist.all_reduce(flat) => [w.wait() for w in [dist.all_reduce(p, async_op=True) for p in flat.split(2**18)]]
  ✗ buffers stay different | start: Rank 1, each rank has a model of its own: after MyDDP(model): 'scale' is [
    [*model.parameters(), *model.buffers()] => model.parameters()
  ✗ a sum | value, accumulation, unused: the gradient of '
    flat /= self.world_size => #
  ✗ each rank adds up in an order of its own | replicas, bytes, frozen, memory: has not the same bits on all ranks
    dist.all_reduce(flat) => dist.all_gather(parts := [flat + 0 for _ in range(self.world_size)], flat) ⏎ flat *= 0
    for parameter, mean => for i in range(self.world_size): flat += parts[i - dist.get_rank()] ⏎ for parameter, mean
  ✗ a call for each parameter | calls: calls for 3.9 MiB of gradients is 81, should be 6
    dist.all_reduce(flat) => for part in flat.split([p.numel() for p in present]): dist.all_reduce(part)
  ✗ an exception leaves it switched off | accumulation: outside after an exception inside no_sync(): the gradient of
    try: ⏎ yield ⏎ finally: ⏎ self.synchronises = before => yield ⏎ self.synchronises = before
  ✗ an inner no_sync switches it on | accumulation: no_sync() after an inner no_sync() has ended is 2, should be 0
    finally: ⏎ self.synchronises = before => finally: ⏎     self.synchronises = True
  ✗ skips what this rank has not used | unused: step 1: the gradient of 'heads.0.weight' is
    strict=True) if anywhere] => strict=True) if parameter.grad is not None]
  ✗ zeros where no rank has a gradient | unused: should be None
    strict=True) if anywhere] => strict=True)]
  ✗ frozen parameters travel too | frozen: 0.weight has a gradient: that is True, should be False
    [parameter for parameter in self.module.parameters() if parameter.requires_grad] => [*self.module.parameters()]
    strict=True) if anywhere] => strict=True) if anywhere or not parameter.requires_grad]
""")
ENDED = {  # what is done instead of the message, and ends every criterion: words of "value"
    "if dist.get_rank() == 0: dist.barrier()": "called barrier",
    "if dist.get_rank() == 2: raise KeyError('lost')": "Rank 2 raised KeyError: 'lost' (in line 41, `if dist.get",
}
REFUSED = {  # file: words of every criterion
    "": "my_ddp.py defines no class MyDDP yet",
    "def MyDDP(:": "my_ddp.py can't be imported: SyntaxError",
}


def found_on_ranks(folder: Path, sources: list[str], *options) -> list[dict[str, str]]:
    """What is wrong with each of these files, all in one start of ranks."""
    paths = [folder.resolve() / f"{number}" / "my_ddp.py" for number in range(len(sources))]
    for path, source in zip(paths, sources, strict=True):
        path.parent.mkdir()
        path.write_text(source)
    importlib.import_module("torch._dynamo.utils")  # which the profiler needs: here once, instead of on each rank
    return on_ranks(my_class.RANKS, lambda: [my_class.judged(path, *options) for path in paths], timeout=200)


def test_the_reference_earns_everything_also_under_torchrun_and_a_killed_rank(tmp_path, capsys):
    path = tmp_path / "my_ddp.py"
    path.write_text(REFERENCE.read_text())
    assert grading.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(my_class.PROMISES)} of {len(my_class.PROMISES)} criteria hold." in printed and "✗" not in printed


def test_a_wrong_class_is_refused_by_the_right_criterion(tmp_path):
    """All others hold."""
    sources = [edited(REFERENCE.read_text(), mistake.text) for mistake in MISTAKES]
    for mistake, found in zip(MISTAKES, found_on_ranks(tmp_path, sources), strict=True):
        expected = mistake.fails.split(", ") if mistake.fails else []
        assert {each for each, complaint in found.items() if complaint} == set(expected), (mistake.title, found)
        assert not expected or mistake.says in found[expected[0]], (mistake.title, found)


def test_what_stops_a_rank_is_named_with_its_line(tmp_path):
    sources = [edited(REFERENCE.read_text(), f"dist.all_reduce(flat) => {mistake}") for mistake in ENDED]
    for words, found in zip(
        ENDED.values(), found_on_ranks(tmp_path, sources, 1.5, [("value", "replicas")]), strict=True
    ):
        assert words in found["value"]


def test_a_file_without_the_class_fails_every_criterion_and_borrowed_work_is_not_the_learners_own(tmp_path):
    *refused, borrowed = found_on_ranks(
        tmp_path, [*REFUSED, "from scratch_ddp import BucketedDDP as MyDDP"], 20, [("start",)]
    )
    for words, found in zip(REFUSED.values(), refused, strict=True):
        assert list(found) == list(my_class.PROMISES) and all(words in each for each in found.values())
    assert borrowed["own work"] == "my_ddp.py uses MyDDP of scratch_ddp.ddp.bucketed"


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
