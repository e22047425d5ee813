"""transformers' Llama, changed in place: alone, with data parallelism on a mesh, saved and loaded."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    clip_grad_norm_,
    gather_full_params,
    parallelize,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.cases import (
    SMALL_LLAMA,
    TOKENS,
    assert_close,
    assert_same_model,
    ids,
    llama,
    next_token_loss,
)

BLOCKS, WIDTH = SMALL_LLAMA["num_hidden_layers"], SMALL_LLAMA["hidden_size"]
ROWS = 2


def steps(plan: dict, tied: bool, norm_type: float) -> dict[str, tuple]:
    """Three steps beside one process, with clipping; return the traffic of the last."""
    plain = llama(tie_word_embeddings=tied)
    sliced = parallelize(llama(tie_word_embeddings=tied), plan)
    assert (sliced.lm_head.weight is sliced.model.embed_tokens.weight) == tied
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, sliced)]
    for step in range(3):
        tokens = ids(ROWS, seed=step)
        loss = next_token_loss(plain(input_ids=tokens).logits, tokens)
        loss.backward()
        with traffic() as forward:
            its_loss = sliced(input_ids=tokens, labels=tokens).loss
        with traffic() as backward:
            its_loss.backward()
        assert_close(its_loss, loss)
        assert_same_model(sliced, plain)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert_close(clip_grad_norm_(sliced, 0.1, norm_type), norm)
        assert_same_model(sliced, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    passes = {"forward": forward, "backward": backward}
    return {name: (each.calls, each.payload_bytes, each.setup.calls) for name, each in passes.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_equals_one_process_and_costs_what_it_says(world_size):
    hidden, a_token = ROWS * TOKENS * WIDTH * 8, ROWS * TOKENS * 8
    checks = {"all_reduce": 2}  # of the ids and of the labels
    for tied, norm_type in ((False, 2.0), (True, float("inf"))):
        for found in run_ranks(world_size, steps, LLAMA, tied, norm_type):
            # Forward: the embedding, two in each block, two for the loss. Backward: two in each block, and the head's.
            calls = 1 + 2 * BLOCKS
            assert found["forward"] == ({"all_reduce": calls + 2}, calls * hidden + 3 * a_token, checks)
            assert found["backward"] == ({"all_reduce": calls}, calls * hidden, {})


@pytest.mark.parametrize("world_size", [2, 4])
def test_sequence_parallel(world_size):
    hidden, a_token = ROWS * TOKENS * WIDTH * 8, ROWS * TOKENS * 8
    for tied in (False, True):
        for found in run_ranks(world_size, steps, LLAMA_SEQUENCE, tied, 2.0):
            calls = 1 + 2 * BLOCKS
            moves = {"all_gather": calls, "reduce_scatter": calls}
            moved = calls * (hidden + hidden // world_size)  # an all-gather is counted by what a rank puts in
            assert found["forward"] == (moves | {"all_reduce": 2}, moved + 3 * a_token, {"all_reduce": 2})
            norms = 1 + 2 * BLOCKS
            assert found["backward"] == (moves | {"all_reduce": norms}, moved + norms * WIDTH * 8, {})


def on_a_mesh(strategy: type, plan: dict) -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = llama()
    model = strategy(parallelize(llama(), plan, mesh["tp"]), group=mesh["dp"])
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for step in range(3):
        tokens = ids(4, seed=step)
        mine = tokens.chunk(2)[mesh["dp"].get_local_rank()]
        with traffic() as counted:
            model(input_ids=mine, labels=mine).loss.backward()
            model.sync_gradients()
        next_token_loss(plain(input_ids=tokens).logits, tokens).backward()
        assert_same_model(model.module, plain)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_close(clip_grad_norm_(model, 0.1, group=mesh["tp"]), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return counted.calls["all_reduce"]


@pytest.mark.parametrize("plan", [LLAMA, LLAMA_SEQUENCE], ids=["plain", "sequence"])
@pytest.mark.parametrize("strategy", [FlatDDP, BucketedDDP])
def test_two_by_two(strategy, plan):
    calls = 1 + 2 * BLOCKS  # of tensor parallelism, in forward and in backward; for sequence parallelism its norms
    expected = (2 * calls if plan is LLAMA else calls) + 2 + 1  # the loss, and all gradients
    assert run_ranks(4, on_a_mesh, strategy, plan) == [expected] * 4


def train(model: torch.nn.Module, steps: range) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        tokens = ids(seed=step)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return gather_full_params(model)


def saved(path: Path) -> dict:
    model = parallelize(llama(tie_word_embeddings=True), LLAMA)
    whole = train(model, range(2))
    if dist.get_rank() == 0:
        torch.save(whole, path)
    return train(model, range(2, 4))


def loaded(path: Path, plan: dict) -> dict:
    model = llama(tie_word_embeddings=True, seed=1)
    model.load_state_dict(torch.load(path))
    return train(parallelize(model, plan), range(2, 4))


def test_saved_on_two_ranks_and_loaded_on_others(tmp_path):
    later = run_ranks(2, saved, tmp_path / "model.pt")[0]
    for world_size, plan in ((1, LLAMA), (4, LLAMA), (4, LLAMA_SEQUENCE)):
        for found in run_ranks(world_size, loaded, tmp_path / "model.pt", plan):
            for name, tensor in later.items():
                assert_close(found[name], tensor, name)
