"""Linear layers and an embedding of which each rank holds a slice. The pair column → row needs one sum, at its end.

    y = act(x Aᵀ) Bᵀ:   A cut by its rows, B by its columns;   rank r:  act(x A_rᵀ) B_rᵀ   is its part of the sum y

A weight of torch.nn.Linear has the shape (out, in): to cut a layer's outputs, one cuts the weight's rows. As the layer
computes x Wᵀ, these are the columns of the matrix that x is multiplied by, hence "column-parallel".
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.checks import agree_on_layer, check_one_of, check_plain, check_tokens
from scratch_ddp.tensor_parallel.moves import all_gather, move, slices_of

ABSENT = "the ranks have gradients of different parameters: run the same backward on every rank"


class ParallelLayer(nn.Module):
    """What the layers have in common: slices of a plain layer's parameters, which can be gathered again.

    `cuts` says along which dimension each sliced parameter is cut; the other parameters are whole on every rank.
    """

    made_of: ClassVar[type[nn.Module]]
    cuts: ClassVar[Mapping[str, int]]

    def __init__(self, plain: nn.Module, group: Group):
        super().__init__()
        self.group = process_group(group)
        check_plain(type(self), plain, self.group)
        for name in ("weight", "bias"):
            parameter = getattr(plain, name, None)
            self.register_parameter(name, None if parameter is None else self._own_part(name, parameter))

    def _own_part(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        values = parameter.detach()
        if name in self.cuts:
            values = slices_of(values, self.group, self.cuts[name])[dist.get_rank(self.group)]
        return nn.Parameter(values.clone(memory_format=torch.contiguous_format), parameter.requires_grad)

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Return the plain layer's parameters by name, on every rank. One all-gather for each that is sliced."""
        return {name: self._whole(name, each.detach()) for name, each in self.named_parameters()}

    def gather_full_grads(self) -> dict[str, torch.Tensor | None]:
        """Return their gradients likewise, None where there is none. One small all-reduce more."""
        grads = {name: each.grad for name, each in self.named_parameters()}
        check_same_lines([name for name in grads if grads[name] is not None], ABSENT, self.group)
        return {name: None if grad is None else self._whole(name, grad) for name, grad in grads.items()}

    def _whole(self, name: str, mine: torch.Tensor) -> torch.Tensor:
        return all_gather(mine, self.group, self.cuts[name]) if name in self.cuts else mine.clone()

    def extra_repr(self) -> str:
        return f"a slice {tuple(self.weight.shape)} for {dist.get_world_size(self.group)} ranks"


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes its slice of the outputs: it holds those rows of weight and bias.

    `from_linear(linear, group)` makes it of a plain layer that every rank holds alike. `group`: a process group, a
    dimension of a mesh (`mesh["tp"]`), or None for all ranks.
    Input: (…, in), whole. Output: this rank's slice (…, out / n); whole with `gather_output`.
    `input_move`: what is done with the input first. "copy" makes its gradient whole; "gather" takes slices of tokens,
    (…, tokens / n, in); None leaves it to the caller, as where several layers share one input (see `move_input`).
    Cost, "copy": nothing in forward, one all-reduce of the input's gradient in backward. "gather": an all-gather and a
    reduce-scatter. `gather_output`: one more all-gather, in forward.
    """

    made_of, cuts = nn.Linear, {"weight": 0, "bias": 0}
    from_linear = classmethod(agree_on_layer)

    def __init__(self, linear: nn.Linear, group: Group = None, gather_output=False, input_move: str | None = "copy"):
        check_one_of("input_move", input_move, ("copy", "gather", None))
        super().__init__(linear, group)
        self.gather_output, self.input_move = gather_output, input_move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(move(x, self.input_move, self.group), self.weight, self.bias)
        return move(y, "join", self.group, dim=-1) if self.gather_output else y


class RowParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes a part of the sum, from its slice of the inputs.

    It holds those columns of the weight, and the whole bias, which is added once, after the sum.
    Input: this rank's slice (…, in / n), as a column-parallel layer returns it; whole unless `input_is_parallel`.
    Output: (…, out), whole. `output_move` "reduce_scatter" returns slices of tokens instead, (…, tokens / n, out).
    Cost: one all-reduce of the output in forward, nothing in backward. "reduce_scatter": a reduce-scatter, an
    all-gather in backward, and one small all-reduce of the bias's gradient. `input_is_parallel=False`: one all-gather
    of the input's gradient more, in backward.
    """

    made_of, cuts = nn.Linear, {"weight": 1}
    from_linear = classmethod(agree_on_layer)

    def __init__(self, linear: nn.Linear, group: Group = None, input_is_parallel=True, output_move: str = "reduce"):
        check_one_of("output_move", output_move, ("reduce", "reduce_scatter"))
        super().__init__(linear, group)
        self.input_is_parallel, self.output_move = input_is_parallel, output_move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.input_is_parallel else move(x, "split", self.group, dim=-1)
        y = move(nn.functional.linear(x, self.weight), self.output_move, self.group)
        if self.bias is None:
            return y
        # A rank that holds some of the tokens has only their part of the bias's gradient.
        return y + (move(self.bias, "copy", self.group, 0) if self.output_move == "reduce_scatter" else self.bias)


class VocabularyParallelEmbedding(ParallelLayer):
    """An embedding of which each rank holds its slice of the rows: it looks up its own tokens, others give zeros.

    `from_embedding(embedding, group)` makes it of a plain one that every rank holds alike.
    Input: the same ids (…, tokens) on every rank. Output: (…, tokens, features), whole; with `output_move`
    "reduce_scatter" slices of tokens, with None partial sums. Raises ValueError on every rank if ids are not in the
    vocabulary, or not the same on all ranks.
    Cost: that check, one small all-reduce; then one all-reduce of the output. Nothing in backward.
    """

    made_of, cuts = nn.Embedding, {"weight": 0}
    from_embedding = classmethod(agree_on_layer)

    def __init__(self, embedding: nn.Embedding, group: Group = None, output_move: str | None = "reduce"):
        check_one_of("output_move", output_move, ("reduce", "reduce_scatter", None))
        super().__init__(embedding, group)
        self.output_move, rows = output_move, len(self.weight)
        self.first, self.vocabulary = dist.get_rank(self.group) * rows, embedding.num_embeddings
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - self.first
        self.padding_idx = padding if 0 <= padding < rows else None  # its row gets no gradient

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        check_tokens("the embedding's ids", ids, self.vocabulary, self.group)
        here = ids - self.first
        others = (here < 0) | (here >= len(self.weight))
        y = nn.functional.embedding(here.masked_fill(others, 0), self.weight, self.padding_idx)
        return move(y.masked_fill(others.unsqueeze(-1), 0), self.output_move, self.group)
