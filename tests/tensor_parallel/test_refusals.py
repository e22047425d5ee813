"""What can't be sliced, or must not be asked of sliced layers, is refused in a sentence, on every rank alike."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from scratch_ddp.ddp import BucketedDDP, FlatDDP
from scratch_ddp.tensor_parallel import (
    LLAMA,
    LLAMA_SEQUENCE,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    move,
    move_input,
    on_token_slices,
    parallelize,
    vocabulary_parallel_cross_entropy,
    vocabulary_parallel_loss,
)
from tests.ranks import assert_refused
from tests.tensor_parallel.cases import VOCABULARY, Block, ids, llama, seeded

PAIR = {"up": ColumnParallelLinear, "down": RowParallelLinear}


class Own(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def column(plain: nn.Module, **options):
    return lambda: ColumnParallelLinear.from_linear(plain, **options)


def plan(model, its: dict):
    """Follow a plan that can't be followed: nothing must be changed."""

    def follow() -> None:
        plain = model()
        before = str(plain)
        try:
            parallelize(plain, its)
        finally:
            assert str(plain) == before

    return follow


def sliced_llama(tokens=None, its: dict = LLAMA):
    return lambda: parallelize(llama(), its)(input_ids=ids(seed=dist.get_rank()) if tokens is None else tokens)


def other_heads() -> nn.Module:
    return llama(hidden_size=24, num_attention_heads=6, num_key_value_heads=3)


def sliced_block() -> nn.Module:
    return parallelize(seeded(Block), PAIR)


def wrapped_first() -> None:
    replica = BucketedDDP(seeded(Block))
    parallelize(replica.module, PAIR)


def dropout_of_own_seeds() -> None:
    model = nn.Sequential(seeded(Block), nn.Dropout(0.1))
    torch.manual_seed(dist.get_rank())
    parallelize(model, PAIR)


def step_of(optimizer: str):
    return lambda: getattr(torch.optim, optimizer)([sliced_block().up.weight]).step(lambda: 0.0)


SLICE = "rank 1: entry 2 is parameter 'up.weight': float64 (12, 8), slice 1, but"
LOGITS, MADE_OF = torch.zeros(2, 16), "ColumnParallelLinear is made of a plain Linear: this"
REFUSED = [
    (f"ranks 0, 1: layer: {MADE_OF} Conv1d has a forward", column(nn.Conv1d(2, 2, 1))),
    ("this Own has a forward, hooks or modules of its own", column(Own(4, 4))),
    ("this ParametrizedLinear has a forward, hooks or modules", column(weight_norm(nn.Linear(4, 4)))),
    ("dimension 0 of a tensor of shape (5, 4) can't be cut evenly for 2 ranks", column(nn.Linear(4, 5))),
    ("dimension 1 of a tensor of shape (2, 3) can't be cut", lambda: RowParallelLinear.from_linear(nn.Linear(3, 2))),
    ("max_norm=1.0 can't", lambda: VocabularyParallelEmbedding.from_embedding(nn.Embedding(4, 2, max_norm=1.0))),
    ("rank 1: TypeError: ", lambda: column(nn.Linear(2, 2), **{"gather": 1} if dist.get_rank() else {})()),
    ("the ranks slice different models", lambda: column(nn.Linear(2, 2 + 2 * dist.get_rank()))()),
    ("the plan's 'q_proj' matches no module", plan(Block, {"q_proj": nn.Linear})),
    (
        "two entries of the plan match 'a.up'",
        plan(lambda: nn.ModuleDict({"a": Block()}), {"up": ColumnParallelLinear, "a.up": nn.Linear}),
    ),
    ("model.layers.0.self_attn: the 3 key heads can't be shared evenly by 2 ranks", plan(other_heads, LLAMA)),
    (
        "model.embed_tokens: dimension 0 of a tensor of shape (31, 16) can't be",
        plan(lambda: llama(vocab_size=31), LLAMA),
    ),
    ("embed.weight and head.weight are the same", plan(TiedHead, {"embed": VocabularyParallelEmbedding})),
    ("the model: 'first.weight' would be whole among slices", plan(Block, {"": move_input, **PAIR})),
    ("the model: Block has no loss_function", plan(Block, {"": vocabulary_parallel_loss})),
    (f"up: {MADE_OF}", plan(sliced_block, PAIR)),
    (SLICE, plan(sliced_block, {"": on_token_slices})),
    ("this Linear has a forward, hooks", wrapped_first),
    (SLICE, lambda: FlatDDP(sliced_block())),
    ("rank 1: entry 6 is dropout, with the seed 1, but", dropout_of_own_seeds),
    ("slices can't be pickled or copied", lambda: copy.deepcopy(sliced_block())),
    *((f"{name} computes with whole matrices", step_of(name)) for name in ("Adafactor", "LBFGS", "Muon")),
    ("work on the same tokens, but these were given different ones\nrank 1:", sliced_llama()),
    ("index out of range", sliced_llama(torch.tensor([[0, VOCABULARY]]))),
    ("index out of range", sliced_llama(torch.tensor([[0, -1]]))),
    ("of shape (2, 7, 16) can't be cut evenly for 2", sliced_llama(ids()[:, :7], LLAMA_SEQUENCE)),
    ("is out of bounds", lambda: vocabulary_parallel_cross_entropy(LOGITS, torch.tensor([3, 40]))),
    ("don't fit targets of shape (3,)", lambda: vocabulary_parallel_cross_entropy(LOGITS, torch.ones(3).long())),
    ("there is no move 'copi'; there are copy, reduce, gather", lambda: move(LOGITS, "copi")),
]


def test_what_is_refused_on_every_rank():
    assert_refused(2, REFUSED)
