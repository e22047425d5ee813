"""What can't be sliced, or must not be asked of sliced layers, is refused in a sentence, on every rank alike."""

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    move,
    move_input,
    parallelize,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_loss,
)
from tests.ranks import run_ranks
from tests.tensor_parallel.cases import VOCABULARY, Block, ids, llama, message_of, seeded


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def column(plain: nn.Module, **options):
    return lambda: ColumnParallelLinear.from_linear(plain, **options)


LAYERS = {
    "made of a torch.nn.Linear, not of a Conv1d": column(nn.Conv1d(2, 2, 1)),
    "this Own has a forward, hooks or modules of its own": column(Own(4, 4)),
    "this ParametrizedLinear has a forward, hooks or modules": column(weight_norm(nn.Linear(4, 4))),
    "the 5 outputs can't be shared evenly by 2 ranks: take a number of ranks that divides 5": column(nn.Linear(4, 5)),
    "the 3 inputs can't be shared evenly by 2 ranks": lambda: RowParallelLinear.from_linear(nn.Linear(3, 2)),
    "the 7 rows of the vocabulary can't": lambda: VocabularyParallelEmbedding.from_embedding(nn.Embedding(7, 2)),
    "with max_norm=1.0 can't be sliced": lambda: VocabularyParallelEmbedding.from_embedding(
        nn.Embedding(4, 2, max_norm=1.0)
    ),
    "'weight' is on the meta device": lambda: RowParallelLinear.from_linear(nn.Linear(2, 2, device="meta")),
}


def test_what_can_not_be_sliced():
    for said in run_ranks(2, lambda: {expected: message_of(make) for expected, make in LAYERS.items()}):
        for expected, message in said.items():
            assert expected in message and message.startswith("ranks 0, 1: "), message


def test_what_one_rank_can_not_slice():
    def ranks():
        return message_of(column(nn.Linear(2, 2), **({"gather": True} if dist.get_rank() else {})))

    assert all(said.startswith("rank 1: ") and "argument 'gather'" in said for said in run_ranks(2, ranks))


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def plans() -> dict[str, str]:
    pair = {"up": ColumnParallelLinear, "down": RowParallelLinear}
    column_up = {"up": ColumnParallelLinear}
    asked = {
        "the plan's 'q_proj' matches no module; their names end in down, first": (Block(), {"q_proj": nn.Linear}),
        "two entries of the plan match 'a.up'": (nn.ModuleDict({"a": Block()}), {**column_up, "a.up": nn.Linear}),
        "model.layers.0.self_attn: the 3 key heads can't be shared evenly by 2 ranks: take a number of "
        "ranks that divides 3": (llama(hidden_size=24, num_attention_heads=6, num_key_value_heads=3), LLAMA),
        "model.embed_tokens: the 31 rows of the vocabulary can't be shared evenly": (llama(vocab_size=31), LLAMA),
        "embed.weight and head.weight are the same parameter: the plan must slice all of them alike": (
            TiedHead(),
            {"embed": VocabularyParallelEmbedding},
        ),
        "the model: 'first.weight' would be whole among slices": (Block(), {"": move_input, **pair}),
        "the model: Block has no loss_function": (Block(), {"": vocabulary_parallel_loss}),
        "the model must be a torch.nn.Module, not list": ([], pair),
        "up: ColumnParallelLinear is made of a torch.nn.Linear, not of a ColumnParallelLinear": (
            parallelize(seeded(Block), pair),
            pair,
        ),
    }
    said = {}
    for expected, (model, plan) in asked.items():
        before = str(model)
        said[expected] = message_of(lambda m=model, p=plan: parallelize(m, p))
        assert str(model) == before  # nothing has been changed
    return said


def test_plans_that_can_not_be_followed():
    for said in run_ranks(2, plans):
        for expected, message in said.items():
            assert f"ranks 0, 1: {expected}" in message, message


def different_shapes() -> list[str]:
    block = seeded(Block)
    block.up = nn.Linear(8, 24 + 2 * dist.get_rank())
    return [message_of(lambda: parallelize(block, {"up": ColumnParallelLinear})), message_of(column(block.up))]


def test_ranks_that_differ():
    for said in run_ranks(2, different_shapes):
        for each in said:
            assert each.startswith("the ranks slice different models") and "(26, 8)" in each and "(24, 8)" in each


def inputs() -> dict[str, str]:
    model, tokens, logits = parallelize(llama(), LLAMA), ids(), torch.zeros(2, 16)
    asked = {
        "all ranks of a tensor-parallel group work on the same tokens, but these were given different ones\nrank 1:": (
            lambda: model(input_ids=ids(seed=dist.get_rank()))
        ),
        "index out of range": lambda: model(input_ids=torch.tensor([[0, VOCABULARY]])),
        "index out of range in self": lambda: model(input_ids=torch.tensor([[0, -1]])),
        "index 40 is out of bounds|index 24 is out of bounds": lambda: vocabulary_parallel_cross_entropy(
            logits, torch.tensor([3, 40])
        ),
        r"logits of shape \(2, 16\) don't fit targets of shape \(3,\)": lambda: vocabulary_parallel_cross_entropy(
            logits, torch.ones(3, dtype=torch.int64)
        ),
        r"dimension 1 of a tensor of shape \(2, 7, 16\) can't be cut evenly for 2 ranks": lambda: parallelize(
            llama(), LLAMA_SEQUENCE
        )(input_ids=tokens[:, :7]),
        "there is no move 'copi'; there are copy, reduce, gather": lambda: move(logits, "copi"),
    }
    return {expected: message_of(do, (ValueError, IndexError, RuntimeError)) for expected, do in asked.items()}


def test_inputs_that_can_not_be_right():
    for said in run_ranks(2, inputs):
        for expected, message in said.items():
            assert re.search(expected, message), message
