"""A pipeline in rank cells, on the simulated network, and under torchrun."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from scratch_ddp.instruments.network import Link, linked_group
from scratch_ddp.pipeline import simulate, zb_h1
from tests.pipeline.cases import alone, batch, build, distance, pipeline_of
from tests.pipeline.test_costs import run_sleeping
from tests.ranks import run_ranks

SET_UP = """
import time
from scratch_ddp import Pipeline

torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(8)))
pipeline = Pipeline(layers, 4, {schedule!r}, torch.nn.functional.mse_loss)
x, y = torch.ones(9, 6), torch.zeros(9, 6)
where = ""

def wait(here):
    time.sleep(60 if rank == 2 and where == here else 0)

layers[4].register_forward_pre_hook(lambda *_: wait("forward"))
layers[4].register_full_backward_hook(lambda *_: wait("backward"))
losses = [pipeline.step(x, y, everywhere=True)]
expected = [parameter.grad.clone() for parameter in pipeline.parameters()]
"""
AFTER = """
where = ""
assert all(parameter.grad is None for parameter in pipeline.parameters())
for _ in range(2):
    pipeline.zero_grad()
    assert pipeline.step(x, y, everywhere=True) == losses[0]
    assert all(torch.equal(each.grad, before) for each, before in zip(pipeline.parameters(), expected))
"""


def ran(kernel, code: str) -> None:
    result = kernel.run(code)
    assert not result.error, result.traceback


def test_stop_in_a_rank_cell_frees_all_stages(four_ranks):
    ran(four_ranks, SET_UP.format(schedule="zb_h1"))
    for where in ("forward", "backward"):
        cell = four_ranks.start(f"where = {where!r}\npipeline.step(x, y)")
        time.sleep(0.7)
        began = time.monotonic()
        four_ranks.interrupt()
        message = four_ranks.finish(cell).message
        assert "All variables are kept" in message and time.monotonic() - began < 3, message
        ran(four_ranks, AFTER)


def on_a_link() -> float:
    group = linked_group(Link(1e-4, 1e-9))
    whole = build()
    pipeline, (x, y) = pipeline_of(whole, 4, "interleaved", group=group), batch(9)
    for _ in range(2):
        pipeline.step(x, y)
        alone(whole, x, y)
    return distance(pipeline, whole)


def test_the_same_values_on_a_link():
    assert max(run_ranks(2, on_a_link)) < 1e-12


@pytest.mark.measures_time
def test_a_step_on_a_link_takes_as_long_as_simulated():
    rows, unit, hop = zb_h1(2, 3), 0.08, 0.05  # long, compared with what a message takes without the link

    def ranks() -> list:
        return run_sleeping(rows, 3, unit, rounds=4, group=linked_group(Link(hop, 0)))[0]

    per_rank = run_ranks(2, ranks)
    ends = [max(row[-1][2] for row in both) - min(row[0][1] for row in both) for both in zip(*per_rank, strict=True)]
    simulated = max(row[-1][2] for row in simulate(rows, lambda action: unit, hop))
    assert min(ends) == pytest.approx(simulated, rel=0.05)


SCRIPT = """
import torch, torch.distributed as dist
from scratch_ddp import Pipeline

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).double()
pipeline = Pipeline(layers, 3, loss=torch.nn.functional.mse_loss)
loss = pipeline.step(torch.ones(7, 6).double(), torch.zeros(7, 6).double(), everywhere=True)
print(f"loss {loss:.12f}")
dist.destroy_process_group()
"""


def test_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))).double()
    loss = layers(torch.ones(7, 6).double()).square().mean().item()
    assert done.stdout.count(f"loss {loss:.12f}") == 2, done.stdout
