"""torch's get_state_dict and set_state_dict: saved by two ranks, loaded by three, as by one process."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import batches, build
from tests.fsdp.cases import CASES
from tests.ranks import run_ranks

CASE = CASES["tiny parameters"]  # with scalars, and fewer rows than ranks
WHOLE, FROM_FIRST = StateDictOptions(full_state_dict=True), {"full_state_dict": True, "broadcast_from_rank0": True}


def make(seed: int = 0, mesh=None) -> tuple[FSDP, torch.optim.Optimizer]:
    sharded = FSDP(build(CASE, seed), mesh, replicated=["blocks.1"])
    return sharded, torch.optim.AdamW(sharded.parameters(), lr=0.01)


def train(model: torch.nn.Module, optimizer, steps: range) -> None:
    """Every rank has the whole batch, so that any number of them computes the same."""
    data = batches(8, 1)
    for step in steps:
        CASE.loss(model, *data[step]).backward()
        if isinstance(model, FSDP):
            model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()


def one_process() -> tuple[dict, dict, dict]:
    """The plain model's states after three steps, and its parameters after five."""
    model = build(CASE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(3))
    states = copy.deepcopy(get_state_dict(model, optimizer))
    train(model, optimizer, range(3, 5))
    return (*states, dict(model.named_parameters()))


def save(folder: Path) -> None:
    sharded, optimizer = make()
    train(sharded, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    assert not any(isinstance(each, DTensor) for state in optimizer.state.values() for each in state.values())
    train(sharded, optimizer, range(3, 5))
    expect_parameters(sharded)


def expect_parameters(sharded: FSDP) -> None:
    *_, later = one_process()
    for name, tensor in sharded.gather_full_params().items():
        torch.testing.assert_close(tensor, later[name].detach(), rtol=0, atol=1e-12, msg=name)


def load(folder: Path, shape=None) -> None:
    mesh = shape and init_device_mesh("cpu", shape)
    sharded, optimizer = make(seed=1, mesh=mesh)
    model_state, optimizer_state = get_state_dict(sharded, optimizer)
    states = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(states, checkpoint_id=folder)
    missing = set_state_dict(sharded, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert not any(missing)
    train(sharded, optimizer, range(3, 5))
    expect_parameters(sharded)


@pytest.mark.parametrize("there, shape", [(3, None), (4, (2, 2)), (1, None)])
def test_saved_by_two_ranks_and_loaded_by_others(tmp_path, there, shape):
    run_ranks(2, save, tmp_path)
    run_ranks(there, load, tmp_path, shape)


def whole() -> None:
    sharded, optimizer = make()
    train(sharded, optimizer, range(3))
    model_state, optimizer_state = get_state_dict(sharded, optimizer, options=WHOLE)
    plain_state, plain_optimizer_state, _ = one_process()
    assert list(model_state) == list(plain_state)
    assert list(optimizer_state["state"]) == list(plain_optimizer_state["state"])
    for name, tensor in plain_state.items():
        torch.testing.assert_close(model_state[name].view_as(tensor), tensor, rtol=0, atol=1e-12)
        for key, value in plain_optimizer_state["state"].get(name, {}).items():
            mine = optimizer_state["state"][name][key]
            torch.testing.assert_close(mine.view_as(value), value, rtol=0, atol=1e-12, msg=f"{name} {key}")
    for options in (WHOLE, StateDictOptions(**FROM_FIRST)):
        other, its_optimizer = make(seed=1)
        here = dist.get_rank() == 0 or not options.broadcast_from_rank0
        states = copy.deepcopy((model_state, optimizer_state) if here else ({}, {}))  # the optimizer keeps some of it
        set_model_state_dict(other, states[0], options=options)
        set_optimizer_state_dict(other, its_optimizer, states[1], options=options)
        train(other, its_optimizer, range(3, 5))
        expect_parameters(other)
    first_only = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(first_only) == (list(plain_state) if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("world_size", [2, 3])
def test_whole_states_are_the_plain_models_and_load_anywhere(world_size):
    run_ranks(world_size, whole)
