"""The cross-entropy of sliced logits: its values, its gradients, and that the logits are nowhere whole."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import vocabulary_parallel_cross_entropy
from tests.ranks import run_ranks
from tests.tensor_parallel.cases import assert_close, random_input


def compare() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    for reduction, scale, ignored in (("mean", 1, ()), ("sum", 1, (0, 3)), ("mean", 1e4, (5,)), ("mean", 1, range(6))):
        logits = (scale * random_input(2, 3, 20)).requires_grad_()
        targets = torch.tensor([[0, 7, 19], [4, 5, 10]])
        targets.view(-1)[list(ignored)] = -100
        mine = logits.detach().chunk(n, -1)[rank].clone().requires_grad_()
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        with traffic() as forward:
            its_loss = vocabulary_parallel_cross_entropy(mine, targets, reduction=reduction)
        torch.testing.assert_close(its_loss, loss, rtol=1e-13, atol=1e-13, equal_nan=True)
        if len(ignored) < 6:
            (3 * loss).backward()
            with traffic() as backward:
                (3 * its_loss).backward(retain_graph=True)
            assert_close(mine.grad, logits.grad.chunk(n, -1)[rank])
            (3 * its_loss).backward()  # what is saved is not changed by a backward
            assert_close(mine.grad, 2 * logits.grad.chunk(n, -1)[rank])
            assert backward.calls == {}
        assert forward.calls == {"all_reduce": 2} and forward.payload_bytes == (1 + 2) * targets.numel() * 8


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_one_process(world_size):
    run_ranks(world_size, compare)


def in_half_precision() -> tuple:
    logits = random_input(4, 20).bfloat16()
    targets = torch.arange(4)
    mine = logits.chunk(2, -1)[dist.get_rank()].clone().requires_grad_()
    loss = vocabulary_parallel_cross_entropy(mine, targets)
    loss.backward()
    return loss.dtype, mine.grad.dtype, abs(loss.item() - cross_entropy(logits.float(), targets).item()) < 1e-6


def test_half_precision_is_computed_in_float32():
    assert run_ranks(2, in_half_precision) == [(torch.float32, torch.bfloat16, True)] * 2
