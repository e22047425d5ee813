"""The capstone's judge of a script: each planted fault is found by what the ranks do, and a hang is ended and named."""

import importlib

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.commands.notebooks import NOTEBOOKS
from scratch_ddp.course.capstone import observe, script, torchrun
from tests.course.answers import edited, read
from tests.ranks import captured, run_ranks

GIVEN = NOTEBOOKS / "capstone" / "misbehaving.py"
MENDS = """
    continue => parameter.grad = torch.zeros_like(parameter)
    model.train() => order = order[dist.get_rank() :: dist.get_world_size()] ⏎ model.train()
    if rank == 0: => accuracy = evaluate(model, *validation_data) ⏎ if rank == 0:
    {evaluate(model, *validation_data):.3f} => {accuracy:.3f}
"""
FAULTS = read("""
misbehaving.py, mended
  ✓ nothing
    parameter.grad = torch.zeros_like(parameter) => parameter.grad = 0 * parameter.detach()
  ✗ a missing gradient is left out | replicas: is not the mean over the ranks (it was not used on rank
    parameter.grad = torch.zeros_like(parameter) => continue
  ✗ nobody averages | replicas: step 1: the gradient of
    average_gradients(model) ⏎ optimizer => optimizer
  ✗ every rank reads all items | data: 128 of rank 1's first 128 items are items of rank 0 too
    order = order[dist.get_rank() :: dist.get_world_size()] =>
  ✗ rank 0 evaluates alone | ends: rank 1 waits at misbehaving.py, line
    accuracy = evaluate(model, *validation_data) => accuracy = evaluate(model, *validation_data) if rank == 0 else 0
  ✗ nobody evaluates | ends: 0 of the 64 validation items are predicted
    accuracy = evaluate(model, *validation_data) => accuracy = 0
""")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_each_fault_is_found_by_its_criterion(fault, tmp_path):
    """On forked ranks, which start sooner than torchrun's."""
    path = tmp_path / "misbehaving.py"
    path.write_text(edited(edited(GIVEN.read_text(), MENDS.strip()), fault.text))
    importlib.import_module("torch._dynamo")  # which optimizers need: once, instead of on each rank

    def observed() -> int:
        dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
        try:
            observe.main(path, tmp_path)
        except SystemExit as ended:
            return ended.code
        return 0

    results = run_ranks(2, captured, observed, waits=3.0)
    ended = torchrun.Ended(results[0][0], [line for _, printed in results for line in printed.splitlines()])
    seen = [torch.load(tmp_path / f"seen.{rank}") for rank in range(2)]
    found = script.complaints(seen, ended.complaint)
    assert {each for each, complaint in found.items() if complaint} == {fault.fails} - {""}, found
    assert not fault.fails or fault.says in found[fault.fails]


def test_the_script_that_learners_get_fails_everywhere_under_torchrun_and_is_ended():
    found = script.judge(GIVEN)
    assert "is not the mean over the ranks" in found["replicas"]
    assert "are items of rank 0 too" in found["data"]
    assert "rank 0 waits at" in found["ends"] and "rank 1 waits at" in found["ends"]
