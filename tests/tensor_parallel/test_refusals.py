"""What can't be sliced, or must not be asked of sliced layers, is refused in a sentence, on every rank alike."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    move,
    parallelize,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_loss,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.cases import Attention, Block, ids, llama, message_of, seeded

LAYERS = {
    "made of a torch.nn.Linear, not of a Conv1d": lambda: ColumnParallelLinear.from_linear(nn.Conv1d(2, 2, 1)),
    "the 5 outputs can't be shared evenly by 2 ranks: 4 or 6 could be": lambda: ColumnParallelLinear.from_linear(
        nn.Linear(4, 5)
    ),
    "the 3 inputs can't be shared evenly by 2 ranks: 2 or 4 could be": lambda: RowParallelLinear.from_linear(
        nn.Linear(3, 2)
    ),
    "the 7 rows of the vocabulary can't": lambda: VocabularyParallelEmbedding.from_embedding(nn.Embedding(7, 2)),
    "with max_norm=1.0 can't be sliced": lambda: VocabularyParallelEmbedding.from_embedding(
        nn.Embedding(4, 2, max_norm=1.0)
    ),
    "weight is on the meta device": lambda: RowParallelLinear.from_linear(nn.Linear(2, 2, device="meta")),
    "input_move is 'copi'; allowed are 'copy', 'gather', None": lambda: ColumnParallelLinear.from_linear(
        nn.Linear(2, 2), input_move="copi"
    ),
    "unexpected keyword argument 'gather'": lambda: RowParallelLinear.from_linear(nn.Linear(2, 2), gather=True),
}


def refused_layers(where: list[int]) -> dict[str, str]:
    mine = dist.get_rank() in where
    fine = lambda: ColumnParallelLinear.from_linear(nn.Linear(2, 2))  # noqa: E731
    return {expected: message_of(make if mine else fine) for expected, make in LAYERS.items()}


@pytest.mark.parametrize(("where", "who"), [([0, 1], "ranks 0, 1: "), ([1], "rank 1: ")])
def test_what_can_not_be_sliced(where, who):
    for said in run_ranks(2, refused_layers, where):
        for expected, message in said.items():
            assert expected in message and message.startswith(who), message


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def plans() -> dict[str, str]:
    pair = {"up": ColumnParallelLinear, "down": RowParallelLinear}
    asked = {
        "the plan's 'upp' matches no module; is up meant?": (Block(), pair | {"upp": nn.Linear}),
        "the plan's 'q_proj' matches no module; their names end in down, first, up": (
            Block(),
            {"q_proj": ColumnParallelLinear},
        ),
        "two entries of the plan match 'up'": (nn.ModuleDict({"up": nn.Linear(2, 2)}), {"up": ColumnParallelLinear}),
        "model.layers.0.self_attn: the 3 key heads can't be shared evenly by 2 ranks: take a number of "
        "ranks that divides 3": (llama(hidden_size=24, num_attention_heads=6, num_key_value_heads=3), LLAMA),
        "model.embed_tokens: the 31 rows of the vocabulary can't be shared evenly": (llama(vocab_size=31), LLAMA),
        "first: ColumnParallelLinear is made of a torch.nn.Linear, not of a LayerNorm": (
            Block(),
            {"first": ColumnParallelLinear},
        ),
        "embed.weight and head.weight are the same parameter: the plan must slice all of them alike": (
            TiedHead(),
            {"embed": VocabularyParallelEmbedding},
        ),
        "the model: Block has no loss_function": (Block(), {"": vocabulary_parallel_loss}),
        "the model must be a torch.nn.Module, not list": ([], pair),
    }
    said = {}
    for expected, (model, plan) in asked.items():
        before = str(model)
        if "two entries" in expected:
            plan = {**plan, "model.up": plan["up"]}
            model = nn.ModuleDict({"model": model})
            before = str(model)
        said[expected.replace("'up'", "'model.up'")] = message_of(lambda m=model, p=plan: parallelize(m, p))
        assert str(model) == before  # nothing has been changed
    twice = parallelize(seeded(Block), pair)
    said["up: ColumnParallelLinear is made of a torch.nn.Linear, not of a ColumnParallelLinear"] = message_of(
        lambda: parallelize(twice, pair)
    )
    return said


def test_plans_that_can_not_be_followed():
    for said in run_ranks(2, plans):
        for expected, message in said.items():
            assert f"ranks 0, 1: {expected}" in message, message


def different_ranks() -> list[str]:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    own_seed, pair = Block(), {"up": ColumnParallelLinear, "down": RowParallelLinear}
    turned = dict(reversed(pair.items())) if rank else pair
    gathers = pair | ({"up": partial(ColumnParallelLinear, gather_output=True)} if rank else {})
    half = seeded(Block)
    half.up = nn.Linear(8, 24 + 2 * rank)
    one_sided = ColumnParallelLinear.from_linear(seeded(nn.Linear, 4, 4))
    if rank:
        one_sided(torch.ones(1, 4, dtype=torch.float64)).detach()
        one_sided.weight.grad = torch.ones_like(one_sided.weight)
    return [
        message_of(lambda: parallelize(own_seed, pair)),
        message_of(lambda: parallelize(seeded(Block), turned)),
        message_of(lambda: parallelize(seeded(Block), gathers)),
        message_of(lambda: parallelize(half, {"up": ColumnParallelLinear})),
        message_of(lambda: ColumnParallelLinear.from_linear(own_seed.up)),
        message_of(lambda: ColumnParallelLinear.from_linear(seeded(nn.Linear, 4, 4), gather_output=bool(rank))),
        message_of(one_sided.gather_full_grads),
    ]


def test_ranks_that_differ():
    for seed, order, option, size, layer, layers_option, gradients in run_ranks(2, different_ranks):
        assert "hold the same values on every rank first" in seed and "rank 1: entry 4 is up.weight" in seed
        assert "rank 1: entry 0 is 'down': RowParallelLinear, but 'up': ColumnParallelLinear on rank 0" in order
        assert "entry 0 is 'up': ColumnParallelLinear with {'gather_output': True}, but" in option
        assert "(26, 8)" in size and "(24, 8)" in size
        assert "entry 1 is weight: torch.float32 (24, 8) with values" in layer
        assert "entry 0 is ColumnParallelLinear with {'gather_output': True}" in layers_option
        assert (
            "gradients of different parameters" in gradients and "rank 1: entry 0 is weight, but nothing" in gradients
        )


def inputs() -> dict[str, str]:
    rank = dist.get_rank()
    model, tokens = parallelize(llama(), LLAMA), ids()
    embedding, logits = model.model.embed_tokens, torch.zeros(2, 16)
    own = ids(seed=rank)
    sliced = parallelize(llama(), LLAMA_SEQUENCE)
    asked = {
        "work on the same tokens, but these were given different ones: the embedding's ids\nrank 0: torch.int64": (
            lambda: model(input_ids=own)
        ),
        "were given different ones: the targets\nrank 0: torch.int64": lambda: model(input_ids=tokens, labels=own),
        "the embedding's ids reach from 0 to 32, but the vocabulary has 32 entries": lambda: embedding(
            torch.tensor([[0, 32]])
        ),
        "rank 1: the embedding's ids reach from -1 to 5": lambda: embedding(torch.tensor([-rank, 5])),
        "the embedding's ids must be int64, not torch.float32": lambda: embedding(torch.ones(2, 2)),
        "the targets reach from 3 to 40": lambda: vocabulary_parallel_cross_entropy(logits, torch.tensor([3, 40])),
        "logits of shape (2, 16) don't fit targets of shape (3,)": lambda: vocabulary_parallel_cross_entropy(
            logits, torch.ones(3, dtype=torch.int64)
        ),
        "reduction is 'none'; allowed are": lambda: vocabulary_parallel_cross_entropy(
            logits, torch.tensor([3, 4]), reduction="none"
        ),
        "dimension 1 of a tensor of shape (2, 7, 16) can't be cut evenly for 2 ranks": lambda: sliced(
            input_ids=tokens[:, :7]
        ),
        "there is no move 'copi'; there are copy, reduce, gather": lambda: move(logits, "copi"),
    }
    said = {}
    for expected, do in asked.items():
        with traffic() as counted:
            said[expected] = message_of(do)
        assert "the targets" in expected or counted.calls == {}, expected  # nothing has been sent
    return said


def test_inputs_that_can_not_be_right():
    for said in run_ranks(2, inputs):
        for expected, message in said.items():
            assert expected in message, message


def attention_without_a_head_size() -> str:
    attention = seeded(Attention)
    attention.head_dim = 16
    return message_of(lambda: parallelize(attention, {"": LLAMA["self_attn"]}))


def test_a_head_is_not_split():
    for said in run_ranks(2, attention_without_a_head_size):
        assert "the model: the 1 query heads can't be shared evenly by 2 ranks: take a number" in said


def twice_differentiated() -> str:
    layer = ColumnParallelLinear.from_linear(seeded(nn.Linear, 4, 4))
    x = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    return message_of(lambda: slope.sum().backward(), RuntimeError)


def test_no_double_backward():
    for said in run_ranks(2, twice_differentiated):
        assert "once_differentiable" in said
