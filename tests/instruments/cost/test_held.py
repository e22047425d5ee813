"""Memory by formula, held against what real ranks hold and what real forwards save: three small models."""

import pytest
import torch
import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank

from scratch_ddp.course.pages import held_by_ranks
from scratch_ddp.course.pages.held_by_ranks import (
    NAMES,
    by_formula,
    fullest,
    loss_of,
    new_model,
    shape_of,
    with_checkpointing,
)
from scratch_ddp.instruments.cost import STAGES, Layout, bytes_per_token, flops_per_token, logits_bytes, saved_bytes
from tests.ranks import run_ranks

SPLITS = {name: [Layout(dp=4, stage=stage) for stage in STAGES] for name in NAMES}
SPLITS["Llama"] += [Layout(tp=4), Layout(pp=4, micro_batches=8)]
SPLITS["two matrices"] += [Layout(pp=4, micro_batches=8)]


def test_ranks_hold_what_the_formulas_say():
    def held():
        return {(name, layout): fullest(name, layout) for name, layouts in SPLITS.items() for layout in layouts}

    for (name, layout), found in run_ranks(4, held)[0].items():
        assert found == pytest.approx(by_formula(name, layout), rel=0.01), f"{name}: {layout}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_forwards_save_what_the_formula_says(name, dtype):
    """A block's bytes are the difference of two models that have one block more or less."""
    sequences, tokens = 2, 64
    per_token = []
    for blocks in (7, 8):
        model = new_model(name, blocks).to(dtype)
        found, loss = saved_bytes(model, lambda model=model: loss_of(model, name, sequences, tokens))
        loss.backward()
        per_token.append(found / (sequences * tokens))
    expected = bytes_per_token(shape_of(name), dtype.itemsize)
    assert per_token[1] - per_token[0] == pytest.approx(expected, rel=0.01)
    logits = logits_bytes(shape_of(name), 1) / 2  # the other half is their gradient, in backward
    assert per_token[1] == pytest.approx(8 * expected + logits, rel=0.05)  # the rest: the last norm, rotations, ids


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_checkpointing_keeps_a_blocks_input(name):
    tokens, per_token = 2 * 64, []
    for blocks in (2, 3):
        model = with_checkpointing(new_model(name, blocks))
        found, loss = saved_bytes(model, lambda model=model: loss_of(model, name, 2, 64))
        loss.backward()
        per_token.append(found / tokens)
    expected = bytes_per_token(shape_of(name), 4, checkpointing=True)
    assert per_token[1] - per_token[0] == pytest.approx(expected, rel=0.05)


def test_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("Llama", "GPT-2"):
        model = new_model(name, 8)
        model.set_attn_implementation("eager")  # torch does not count the fused one on a CPU
        with FlopCounterMode(display=False) as counted:
            loss_of(model, name, 2, 64).backward()
        expected = 2 * 64 * flops_per_token(shape_of(name), 64)
        assert counted.get_total_flops() == pytest.approx(expected, rel=0.01), name
    assert held_by_ranks.TWO_MATRICES.parameters * 6 == flops_per_token(held_by_ranks.TWO_MATRICES, 64)
