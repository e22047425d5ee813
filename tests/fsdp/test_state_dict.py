"""The whole model's state dict on the first rank, into a plain model and back; and each rank's shards as DTensors."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from scratch_ddp.fsdp import FSDP
from tests.ddp.cases import CASES, batches, build, gathered
from tests.fsdp.cases import CASES as ALL_CASES
from tests.fsdp.cases import message_of
from tests.ranks import run_ranks

NAMES = ["mlp", "tied", "BatchNorm", "several dtypes", "tiny parameters", "transposed", "empty parameter"]


def train(sharded: FSDP, case_name: str) -> None:
    """A step, so that the values are no longer those of the seed."""
    case = ALL_CASES[case_name]
    x, y = batches(1, 1)[0]
    case.loss(sharded, x, y).backward()
    sharded.sync_gradients()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()


def there_and_back() -> None:
    for name in NAMES:
        sharded = FSDP(build(ALL_CASES[name]), replicated=["1.weight"] if name == "BatchNorm" else [])
        train(sharded, name)
        state = sharded.full_state_dict()
        if dist.get_rank() == 0:
            plain = build(ALL_CASES[name], seed=1)
            assert list(state) == list(plain.state_dict()), name
            plain.load_state_dict(state)
            for key, tensor in sharded.gather_full_params().items():
                torch.testing.assert_close(plain.get_parameter(key).data, tensor, rtol=0, atol=0)
        else:
            assert state == {}
            sharded.gather_full_params()
        other = FSDP(build(ALL_CASES[name], seed=2))
        other.load_full_state_dict(state if state else None)
        for (key, mine), theirs in zip(other.named_parameters(), sharded.parameters(), strict=True):
            if mine.shape == theirs.shape:  # what is replicated in one of them is not in the other
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=f"{name}: {key}")
        for mine, theirs in zip(other.module.buffers(), sharded.module.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
        train(other, name)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_full_state_dict_is_the_plain_models(world_size):
    run_ranks(world_size, there_and_back)


def files(folder) -> list[str]:
    sharded, first = FSDP(build(CASES["mlp"])), dist.get_rank() == 0
    before = sharded.gather_full_params()
    sharded.save_full_state_dict(folder / "whole.pt")
    assert (os.listdir(folder) == ["whole.pt"]) or not first
    whole = torch.load(folder / "whole.pt", weights_only=True)
    if first:
        (folder / "short.pt").write_bytes((folder / "whole.pt").read_bytes()[:-600])
        torch.save({"0.weight": whole["0.weight"]}, folder / "lacks.pt")
        torch.save(whole | {"9.weight": whole["0.weight"]}, folder / "more.pt")
        torch.save(whole | {"0.weight": whole["0.weight"][:3]}, folder / "shape.pt")
        torch.save(whole | {"2.bias": whole["2.bias"].float()}, folder / "dtype.pt")
    messages = [
        message_of(lambda name=name: sharded.load_full_state_dict(folder / name if first else None))
        for name in ("nowhere.pt", "short.pt", "lacks.pt", "more.pt", "shape.pt", "dtype.pt")
    ]
    messages.append(message_of(lambda: sharded.load_full_state_dict([1, 2] if first else None)))
    messages.append(message_of(lambda: sharded.save_full_state_dict(folder / "no" / "folder.pt")))
    assert all(torch.equal(before[name], now) for name, now in sharded.gather_full_params().items())
    train(sharded, "mlp")
    sharded.load_full_state_dict(str(folder / "whole.pt"))
    assert all(torch.equal(before[name], now) for name, now in sharded.gather_full_params().items())
    return messages


def test_files_that_are_not_this_models(tmp_path):
    for nowhere, short, lacks, more, shape, dtype, no_dict, unwritable in run_ranks(2, files, tmp_path):
        assert all(text.startswith("rank 0: ") for text in (nowhere, short, lacks, more, shape, dtype, no_dict))
        assert "nowhere.pt can't be read" in nowhere and "or was cut short" in short
        assert "of another model: it lacks '0.bias'" in lacks and "it has '9.weight', which this one lacks" in more
        assert "'0.weight' has the shape (3, 6) there and (10, 6) here" in shape
        assert "of another dtype: '2.bias' is torch.float32 there and torch.float64 here" in dtype
        assert "state dict or the path of one, not list" in no_dict and "folder.pt can't be written" in unwritable


def as_dtensors(folder) -> None:
    sharded = FSDP(build(ALL_CASES["tiny parameters"]), replicated=["one"])
    train(sharded, "tiny parameters")
    state, whole = sharded.state_dict(), sharded.gather_full_params()
    assert list(state) == list(whole) and not isinstance(state["one"], DTensor)
    for name, tensor in state.items():
        if name != "one":
            torch.testing.assert_close(tensor.full_tensor().view_as(whole[name]), whole[name], rtol=0, atol=0)
    assert list(nn.ModuleDict({"part": sharded}).state_dict()) == [f"part.{name}" for name in state]
    dcp.save(state, checkpoint_id=folder)
    other = FSDP(build(ALL_CASES["tiny parameters"], seed=1), replicated=["one"])
    dcp.load(other.state_dict(), checkpoint_id=folder)  # in place
    assert all(torch.equal(whole[name], tensor) for name, tensor in other.gather_full_params().items())
    third = FSDP(build(ALL_CASES["tiny parameters"], seed=2), replicated=["one"])
    third.load_state_dict(state)
    assert all(torch.equal(whole[name], tensor) for name, tensor in third.gather_full_params().items())
    only_one = third.load_state_dict({"one": state["one"], "more": state["one"]}, strict=False)
    assert only_one.unexpected_keys == ["more"] and only_one.missing_keys == [name for name in state if name != "one"]
    assert not any(third.load_state_dict(state))
    assert "leave it out" in message_of(lambda: third.load_state_dict(state, assign=True))
    fourth = FSDP(build(ALL_CASES["tiny parameters"], seed=3))
    fourth.load_state_dict(whole)  # whole tensors, on every rank
    assert all(torch.equal(whole[name], tensor) for name, tensor in fourth.gather_full_params().items())
    with pytest.raises(AttributeError, match="no attribute 'generate': the wrapped model is .module"):
        sharded.generate()
    wrong = [{**state, "more": state["one"]}, {"one": state["one"]}, {**state, "scale": torch.ones(2, 2)}]
    messages = [message_of(lambda state=state: third.load_state_dict(state)) for state in wrong]
    assert "it has 'more'" in messages[0] and "it lacks" in messages[1], messages
    assert "'scale' is torch.float32 (2, 2)" in messages[2] and len(set(gathered(tuple(messages)))) == 1


def test_shards_as_dtensors(tmp_path):
    run_ranks(3, as_dtensors, tmp_path)
