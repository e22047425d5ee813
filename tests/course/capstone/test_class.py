"""The capstone's judge of a class: it earns everything or is refused by the right criterion, and nothing hangs."""

import importlib
from pathlib import Path

from scratch_ddp.commands import grade as grading
from scratch_ddp.course.capstone import my_class, real_loop
from scratch_ddp.course.capstone.torchrun import complaint
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
    "if dist.get_rank() == 2: raise KeyError('lost')": "raised KeyError: 'lost' (in line 41, `if dist.get",
}
REFUSED = {  # file: words of every criterion
    "": "my_ddp.py defines no class MyDDP yet",
    "def MyDDP(:": "my_ddp.py can't be imported: SyntaxError",
}


def test_wrong_classes_are_refused_by_the_right_criterion_and_what_stops_a_rank_is_named(tmp_path):
    """All in one start of ranks; a mistake is tried with the exercises of its criteria."""
    reference, value, tries = REFERENCE.read_text(), [("value", "replicas")], []
    for mistake in MISTAKES:
        names = [each for each in my_class.EXERCISES if not mistake.fails or {*each} & {*mistake.fails.split(", ")}]
        tries.append((edited(reference, mistake.text), 20, names))
    tries += [(edited(reference, f"dist.all_reduce(flat) => {instead}"), 1.5, value) for instead in ENDED]
    tries += [(source, 20, value) for source in REFUSED]
    paths = [tmp_path.resolve() / f"{number}" / "my_ddp.py" for number in range(len(tries))]
    for path, (source, *_) in zip(paths, tries, strict=True):
        path.parent.mkdir()
        path.write_text(source)
    importlib.import_module("torch._dynamo.utils")  # which the profiler needs: here once, instead of on each rank
    given = [(path, *others) for path, (_, *others) in zip(paths, tries, strict=True)]
    found = on_ranks(3, lambda: [my_class.judged(*each) for each in given], timeout=200)
    for mistake, complaints in zip(MISTAKES, found, strict=False):
        expected = mistake.fails.split(", ") if mistake.fails else []
        assert {each for each, words in complaints.items() if words} == {*expected}, (mistake.title, complaints)
        assert not expected or mistake.says in complaints[expected[0]], (mistake.title, complaints)
    *ended, empty, unreadable = found[len(MISTAKES) :]
    assert all(words in each["value"] for words, each in zip(ENDED.values(), ended, strict=True)), ended
    for words, complaints in zip(REFUSED.values(), (empty, unreadable), strict=True):
        assert list(complaints) == list(my_class.PROMISES) and all(words in each for each in complaints.values())


def test_the_reference_earns_everything_also_under_torchrun_and_a_killed_rank(tmp_path, capsys):
    path = tmp_path / "my_ddp.py"
    path.write_text(REFERENCE.read_text())
    assert grading.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"{len(my_class.PROMISES)} of {len(my_class.PROMISES)} criteria hold." in printed and "✗" not in printed


def test_what_is_said_of_the_run_under_torchrun():
    losses, lost, resumed = {step: {"loss": 1.0} for step in range(1, 11)}, "rank 1 raises: x", ["resumed after step 4"]

    def said(*run):
        return list(real_loop.complaints(losses, *run).values())

    assert said(losses, True, "", resumed) == ["", ""]
    assert said({}, False, lost, []) == [lost, "the run did not come so far"]
    assert said(losses, True, "", []) == ["", "the run did not go on from its checkpoint"]
    assert said({1: {"loss": 1.0}}, True, "", resumed) == ["", "only 1 of 10 steps were made"]
    assert said(losses | {3: {"loss": 2.0}}, True, "", resumed)[0] == "step 3: loss 2.000000; one process has 1.000000"
    assert complaint(1, ["rank 0 waits at x", "rank 1 raises ValueError: lost"]) == "rank 1 raises ValueError: lost"
