"""Each layer computes what the plain one does, in forward and backward, with the calls and bytes that it promises."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.instruments.network import Link, linked_group
from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    attention_by_heads,
    move,
    move_input,
    on_token_slices,
    parallelize,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.cases import (
    Attention,
    Block,
    assert_close,
    assert_same_model,
    ids,
    random_input,
    seeded,
)

ROWS, TOKENS, IN, OUT = 2, 8, 16, 12
WHOLE = ROWS * TOKENS * IN * 8  # bytes of an activation in float64; with OUT features three quarters of it


def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def one_layer(layer: type, bias: bool, x_cut: int | None, y_cut: int | None, **options) -> tuple:
    """Compare with the plain layer, whose input is sliced along `x_cut` and output along `y_cut`; return the traffic.

    Behind a whole output, each rank computes the same; behind a slice, with its slice.
    """
    plain = seeded(nn.Linear, IN, OUT, bias=bias)
    sliced = layer.from_linear(plain, **options)
    x, weights = random_input(ROWS, TOKENS, IN).requires_grad_(), random_input(ROWS, TOKENS, OUT, seed=2)
    y = plain(x)
    (y * weights).sum().backward()
    its_x = (x if x_cut is None else mine(x, x_cut)).detach().clone().requires_grad_()
    with traffic() as forward:
        its_y = sliced(its_x)
    assert_close(its_y, y if y_cut is None else mine(y, y_cut), "output")
    loss = (its_y * (weights if y_cut is None else mine(weights, y_cut))).sum()
    with traffic() as backward:
        loss.backward()
    assert_close(its_x.grad, x.grad if x_cut is None else mine(x.grad, x_cut), "input's gradient")
    assert_same_model(sliced, plain)
    assert set(sliced.gather_full_grads()) == ({"weight", "bias"} if bias else {"weight"})
    return (forward.calls, forward.payload_bytes), (backward.calls, backward.payload_bytes)


def nothing(n: int) -> tuple:
    return {}, 0


def call(name: str, nbytes: int, sliced: bool = False):
    return lambda n: ({name: 1}, nbytes // n if sliced else nbytes)


X, Y = WHOLE, WHOLE * OUT // IN
LAYERS = {  # the layer, how its input and output are sliced, and what forward and backward cost
    "column": (ColumnParallelLinear, {}, None, -1, nothing, call("all_reduce", X)),
    "column, gathered": (
        ColumnParallelLinear,
        {"gather_output": True},
        None,
        None,
        call("all_gather", Y, True),
        call("all_reduce", X),
    ),
    "column, tokens": (
        ColumnParallelLinear,
        {"input_move": "gather"},
        1,
        -1,
        call("all_gather", X, True),
        call("reduce_scatter", X),
    ),
    "row": (RowParallelLinear, {}, -1, None, call("all_reduce", Y), nothing),
    "row, whole input": (
        RowParallelLinear,
        {"input_is_parallel": False},
        None,
        None,
        call("all_reduce", Y),
        call("all_gather", X, True),
    ),
    "row, tokens": (
        RowParallelLinear,
        {"output_move": "reduce_scatter"},
        -1,
        1,
        call("reduce_scatter", Y),
        call("all_gather", Y, True),
    ),
}


def each_layer() -> None:
    n = dist.get_world_size()
    for name, (layer, options, x_cut, y_cut, forward, backward) in LAYERS.items():
        found = one_layer(layer, False, x_cut, y_cut, **options)
        assert found == (forward(n), backward(n)), f"{name}: {found}"
        with_bias = one_layer(layer, True, x_cut, y_cut, **options)
        if name != "row, tokens":  # whose bias's gradient is summed
            assert with_bias == found, f"{name}: {with_bias}"
        else:
            assert with_bias[1][0] == {"all_gather": 1, "all_reduce": 1} and with_bias[1][1] == Y // n + OUT * 8


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_linear_layers(world_size):
    run_ranks(world_size, each_layer)


def embedding() -> None:
    n, calls = dist.get_world_size(), {}
    for padding, output_move, cut in ((None, "reduce", None), (3, "reduce", None), (21, "reduce_scatter", 1)):
        plain = seeded(nn.Embedding, 32, IN, padding_idx=padding)
        sliced, tokens = VocabularyParallelEmbedding.from_embedding(plain, output_move=output_move), ids()
        tokens[0, :3] = torch.tensor([0, 3, 21])
        y, weights = plain(tokens), random_input(2, 8, IN)
        (y * weights).sum().backward()
        with traffic() as counted:
            its_y = sliced(tokens)
        assert_close(its_y, y if cut is None else mine(y, cut))
        (its_y * (weights if cut is None else mine(weights, cut))).sum().backward()
        assert_same_model(sliced, plain)
        calls[output_move] = counted.calls, counted.payload_bytes, counted.setup.calls
    assert calls["reduce"] == ({"all_reduce": 1}, WHOLE, {"all_reduce": 1}), n
    assert calls["reduce_scatter"] == ({"reduce_scatter": 1}, WHOLE, {"all_reduce": 1})


@pytest.mark.parametrize("world_size", [2, 4])
def test_vocabulary_parallel_embedding(world_size):
    run_ranks(world_size, embedding)


def compare(plain: nn.Module, plan: dict, tokens_sliced: bool = False, group=None) -> tuple[dict, dict]:
    """A part of a model on a whole input, or on slices of tokens; the calls of forward and backward."""
    plain = copy.deepcopy(plain)
    plain.zero_grad()
    sliced = parallelize(copy.deepcopy(plain), plan, group)
    width = next(plain.parameters()).shape[-1]
    x = random_input(ROWS, TOKENS, width)
    its_x = (mine(x, 1) if tokens_sliced else x.clone()).requires_grad_()
    x.requires_grad_()
    y = plain(x)
    y.square().sum().backward()
    with traffic() as forward:
        its_y = sliced(its_x)
    with traffic() as backward:
        its_y.square().sum().backward()
    assert_close(its_y, mine(y, 1) if tokens_sliced else y)
    assert_close(its_x.grad, mine(x.grad, 1) if tokens_sliced else x.grad)
    assert_same_model(sliced, plain)
    return forward.calls, backward.calls


COLUMNS = partial(ColumnParallelLinear, input_move=None)
HEADS = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), COLUMNS), "o_proj": RowParallelLinear}
SUMMED = partial(RowParallelLinear, output_move="reduce_scatter")


def parts_of_a_block() -> None:
    one = {"all_reduce": 1}
    block, attention = seeded(Block), seeded(Attention)
    pair = {"up": ColumnParallelLinear, "down": RowParallelLinear}
    assert compare(block, pair) == (one, one)
    assert compare(attention, {"": attention_by_heads, **HEADS}) == (one, one)
    each = {**dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColumnParallelLinear), "o_proj": RowParallelLinear}
    assert compare(attention, each) == (one, {"all_reduce": 3})  # an f in each of q, k, v
    tokens = {"up": partial(ColumnParallelLinear, input_move="gather"), "down": SUMMED, "first": on_token_slices}
    forward, backward = compare(block, tokens, tokens_sliced=True)
    assert forward == {"all_gather": 1, "reduce_scatter": 1}
    assert backward == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 3}  # the norm's two parameters, a bias
    tokens = {"": partial(attention_by_heads, move="gather"), **HEADS, "o_proj": SUMMED}
    assert compare(attention, tokens, tokens_sliced=True)[0] == {"all_gather": 1, "reduce_scatter": 1}
    assert compare(seeded(nn.Sequential, nn.Linear(8, 8), nn.Tanh()), {"": move_input, "0": gathered}) == (
        {"all_gather": 1},
        one,
    )


gathered = partial(ColumnParallelLinear, gather_output=True, input_move=None)


@pytest.mark.parametrize("world_size", [2, 4])
def test_mlp_and_attention(world_size):
    run_ranks(world_size, parts_of_a_block)


def other_ways() -> None:
    """On a simulated link; with frozen, bfloat16 and shared layers; several forwards; a tensor of two dimensions."""
    pair = {"up": ColumnParallelLinear, "down": RowParallelLinear}
    assert compare(seeded(Block), pair, group=linked_group(Link(1e-4, 1e-9)))[0] == {"all_reduce": 1}
    frozen = seeded(Block)
    frozen.up.requires_grad_(False)
    compare(frozen, pair)
    shared = seeded(nn.Sequential, nn.Linear(8, 8), nn.Tanh())
    shared.append(shared[0])
    shared = parallelize(shared, dict.fromkeys("02", partial(ColumnParallelLinear, gather_output=True)))
    assert shared[2].weight is shared[0].weight
    half = ColumnParallelLinear.from_linear(nn.Linear(8, 8, dtype=torch.bfloat16))
    assert half(torch.ones(3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16
    tokens = move(torch.full((4, 2), dist.get_rank() + 1.0), "reduce_scatter")
    assert tokens.tolist() == [[3.0, 3.0]] * 2


def test_other_ways_to_use_them():
    run_ranks(2, other_ways)


def moved(name: str) -> tuple:
    """A rank's own number, moved along a dimension of two; the gradient is its number too."""
    own = float(dist.get_rank() + 1)
    x = torch.tensor([[own], [10 * own]], requires_grad=True)
    y = move(x, name)
    y.backward(own * torch.ones_like(y))
    return y.flatten().tolist(), x.grad.flatten().tolist()


MOVES = {  # what the two ranks get, forward and backward
    "copy": (([1, 10], [3, 3]), ([2, 20], [3, 3])),
    "reduce": (([3, 30], [1, 1]), ([3, 30], [2, 2])),
    "gather": (([1, 10, 2, 20], [3, 3]), ([1, 10, 2, 20], [3, 3])),
    "reduce_scatter": (([3], [1, 2]), ([30], [1, 2])),
    "join": (([1, 10, 2, 20], [1, 1]), ([1, 10, 2, 20], [2, 2])),
    "split": (([1], [1, 2]), ([20], [1, 2])),
}


def test_the_table_of_moves():
    found = run_ranks(2, lambda: [moved(name) for name in MOVES])
    for place, expected in enumerate(MOVES.values()):
        assert tuple(each[place] for each in found) == expected
