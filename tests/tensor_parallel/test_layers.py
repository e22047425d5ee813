"""Each layer computes what the plain one does, in forward and backward, with the calls and bytes that it promises."""

import copy
from collections import OrderedDict
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    move,
    move_input,
    on_token_slices,
    parallelize,
    vocabulary_parallel_cross_entropy,
)
from tests.ranks import in_turn
from tests.tensor_parallel.cases import Block, assert_close, assert_same_model, ids, random_input, seeded

ROWS, TOKENS, IN, OUT = 2, 8, 16, 12
WHOLE = ROWS * TOKENS * IN * 8  # bytes of an activation in float64
PAIR = {"up": ColumnParallelLinear, "down": RowParallelLinear}


def mine(x: torch.Tensor, dim: int | None) -> torch.Tensor:
    """This rank's slice along a dimension, or all of it."""
    return x.clone() if dim is None else x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


LAYERS = [  # the layer, along what its input and output are sliced, and the calls of forward and backward
    (ColumnParallelLinear, {}, (None, -1), {}, {"all_reduce": 1}),
    (ColumnParallelLinear, {"gather_output": True}, (None, None), {"all_gather": 1}, {"all_reduce": 1}),
    (ColumnParallelLinear, {"input_move": "gather"}, (1, -1), {"all_gather": 1}, {"reduce_scatter": 1}),
    (RowParallelLinear, {}, (-1, None), {"all_reduce": 1}, {}),
    (RowParallelLinear, {"input_is_parallel": False}, (None, None), {"all_reduce": 1}, {"all_gather": 1}),
    (RowParallelLinear, {"output_move": "reduce_scatter"}, (-1, 1), {"reduce_scatter": 1}, {"all_gather": 1}),
]


def each_layer(bias: bool) -> None:
    for layer, options, (x_cut, y_cut), in_forward, in_backward in LAYERS:
        plain = seeded(nn.Linear, IN, OUT, bias=bias)
        sliced = layer.from_linear(plain, **options)
        x, weights = random_input(ROWS, TOKENS, IN).requires_grad_(), random_input(ROWS, TOKENS, OUT, seed=2)
        y = plain(x)
        (y * weights).sum().backward()
        its_x = mine(x, x_cut).detach().requires_grad_()
        with traffic() as forward:
            its_y = sliced(its_x)
        assert_close(its_y, mine(y, y_cut), "output")
        loss = (its_y * mine(weights, y_cut)).sum()
        with traffic() as backward:
            loss.backward()
        assert_close(its_x.grad, mine(x.grad, x_cut), "input's gradient")
        assert_same_model(sliced, plain)
        summed = bias and "output_move" in options  # the bias's gradient, from slices of tokens
        calls = in_backward | ({"all_reduce": 1} if summed else {})
        assert (forward.calls, backward.calls) == (in_forward, calls), (layer, options)


def embedding() -> None:
    calls = {}
    for padding, output_move, cut in ((None, "reduce", None), (3, "reduce", None), (21, "reduce_scatter", 1)):
        plain = seeded(nn.Embedding, 32, IN, padding_idx=padding)
        sliced, tokens = VocabularyParallelEmbedding.from_embedding(plain, output_move=output_move), ids()
        tokens[0, :3] = torch.tensor([0, 3, 21])
        weights = random_input(2, 8, IN)
        for first in (True, False):
            y = plain(tokens)
            (y * weights).sum().backward()
            with traffic() as counted:
                its_y = sliced(tokens)
            assert_close(its_y, mine(y, cut))
            (its_y * mine(weights, cut)).sum().backward()
            assert_same_model(sliced, plain)
            assert counted.setup.calls == ({"all_reduce": 1} if first else {})  # are the tokens the same?
        calls[output_move] = counted.calls, counted.payload_bytes
    assert calls == {"reduce": ({"all_reduce": 1}, WHOLE), "reduce_scatter": ({"reduce_scatter": 1}, WHOLE)}


def compare(plain: nn.Module, plan: dict, cut: int | None = None) -> tuple[dict, dict]:
    """A part of a model on a whole input, or on slices along a dimension; the calls of forward and backward."""
    sliced = parallelize(copy.deepcopy(plain), plan)
    width = next(plain.parameters()).shape[-1]
    x = random_input(ROWS, TOKENS, width)
    its_x = mine(x, cut).requires_grad_()
    x.requires_grad_()
    y = plain(x)
    y.square().sum().backward()
    with traffic() as forward:
        its_y = sliced(its_x)
    with traffic() as backward:
        its_y.square().sum().backward()
    assert_close(its_y, mine(y, cut))
    assert_close(its_x.grad, mine(x.grad, cut))
    assert_same_model(sliced, plain)
    return forward.calls, backward.calls


def blocks() -> None:
    """An MLP between norms: on whole inputs, on slices of tokens, and one layer whose input is moved for it."""
    one = {"all_reduce": 1}
    assert compare(seeded(Block), PAIR) == (one, one)
    summed = partial(RowParallelLinear, output_move="reduce_scatter")
    tokens = {"up": partial(ColumnParallelLinear, input_move="gather"), "down": summed, "first": on_token_slices}
    forward, backward = compare(seeded(Block), tokens, cut=1)
    assert forward == {"all_gather": 1, "reduce_scatter": 1}
    assert backward == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 3}  # the norm's two parameters, a bias
    gathered = partial(ColumnParallelLinear, gather_output=True, input_move=None)
    moved = {"": move_input, "0": gathered}
    assert compare(seeded(nn.Sequential, nn.Linear(8, 8), nn.Tanh()), moved) == ({"all_gather": 1}, one)


def other_ways() -> None:
    """With frozen, bfloat16 and shared layers; a tensor of two dimensions; the first rank's values win."""
    frozen = seeded(Block)
    frozen.up.requires_grad_(False)
    compare(frozen, PAIR)
    shared = seeded(nn.Sequential, nn.Linear(8, 8), nn.Tanh())
    shared.append(shared[0])
    shared = parallelize(shared, dict.fromkeys("02", partial(ColumnParallelLinear, gather_output=True)))
    assert shared[2].weight is shared[0].weight
    block = seeded(Block)
    twice = nn.Sequential(OrderedDict(up=block.up, down=block.down))
    columns = partial(ColumnParallelLinear, input_move=None)
    compare(nn.Sequential(block.first, twice, twice), PAIR | {"1": move_input, "2": move_input, "up": columns})
    half = ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert half(torch.ones(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    tokens = move(torch.full((4, 2), dist.get_rank() + 1.0), "reduce_scatter")
    assert tokens.tolist() == [[3.0, 3.0]] * 2
    own = seeded(Block)
    for parameter in own.parameters():
        parameter.data += dist.get_rank()
    assert_same_model(parallelize(own, PAIR), seeded(Block))
    torch.manual_seed(dist.get_rank())
    own = nn.Linear(4, 4).double()
    layer = RowParallelLinear.from_linear(own)
    torch.manual_seed(0)
    assert_same_model(layer, nn.Linear(4, 4).double())
    assert own.weight.shape == (4, 4)
    assert layer.weight.untyped_storage().nbytes() == 4 * 2 * 8  # not a view of the plain one's


def loss() -> None:
    """The cross-entropy of sliced logits, which are nowhere whole."""
    n, rank = dist.get_world_size(), dist.get_rank()
    for reduction, scale, ignored in (("mean", 1, ()), ("sum", 1, (0, 3)), ("mean", 1e4, (5,)), ("mean", 1, range(6))):
        logits = (scale * random_input(2, 3, 20)).requires_grad_()
        targets = torch.tensor([[0, 7, 19], [4, 5, 10]])
        targets.view(-1)[list(ignored)] = -100
        mine = logits.detach().chunk(n, -1)[rank].clone().requires_grad_()
        its = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
        with traffic() as forward:
            its_loss = vocabulary_parallel_cross_entropy(mine, targets, reduction=reduction)
        torch.testing.assert_close(its_loss, its, rtol=1e-13, atol=1e-13, equal_nan=True)
        if len(ignored) < 6:
            (3 * its).backward()
            with traffic() as backward:
                (3 * its_loss).backward(retain_graph=True)
            assert_close(mine.grad, logits.grad.chunk(n, -1)[rank])
            (3 * its_loss).backward()  # what is saved is not changed by a backward
            assert_close(mine.grad, 2 * logits.grad.chunk(n, -1)[rank])
            assert backward.calls == {}
        assert forward.calls == {"all_reduce": 2} and forward.payload_bytes == (1 + 2) * targets.numel() * 8


def loss_in_half_precision() -> None:
    """It is computed in float32."""
    logits, targets = random_input(4, 20).bfloat16(), torch.arange(4)
    mine_ = mine(logits, -1).requires_grad_()
    found = vocabulary_parallel_cross_entropy(mine_, targets)
    found.backward()
    assert (found.dtype, mine_.grad.dtype) == (torch.float32, torch.bfloat16)
    assert abs(found.item() - cross_entropy(logits.float(), targets).item()) < 1e-6


MOVES = {  # what the two ranks get of their own numbers: forward, and backward
    "copy": (([1, 10], [3, 3]), ([2, 20], [3, 3])),
    "reduce": (([3, 30], [1, 1]), ([3, 30], [2, 2])),
    "gather": (([1, 10, 2, 20], [3, 3]), ([1, 10, 2, 20], [3, 3])),
    "reduce_scatter": (([3], [1, 2]), ([30], [1, 2])),
    "join": (([1, 10, 2, 20], [1, 1]), ([1, 10, 2, 20], [2, 2])),
    "split": (([1], [1, 2]), ([20], [1, 2])),
}


def table_of_moves() -> None:
    """A rank's own number, moved along a dimension of two; the gradient is its number too."""
    for name, expected in MOVES.items():
        own = float(dist.get_rank() + 1)
        x = torch.tensor([[own], [10 * own]], requires_grad=True)
        y = move(x, name)
        y.backward(own * torch.ones_like(y))
        assert (y.flatten().tolist(), x.grad.flatten().tolist()) == expected[dist.get_rank()], name


CHECKS = {
    1: [(compare, seeded(Block), PAIR), (loss,)],
    2: [
        *[(each_layer, True), (embedding,), (blocks,), (loss,)],
        *[(other_ways,), (loss_in_half_precision,), (table_of_moves,)],
    ],
    4: [(each_layer, False), (embedding,), (blocks,), (loss,)],
}


@pytest.mark.parametrize("world_size", CHECKS)
def test_layers_blocks_and_the_loss(world_size):
    in_turn(world_size, lambda check, *args: check(*args), CHECKS[world_size])
