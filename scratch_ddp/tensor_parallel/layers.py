"""Linear layers and an embedding of which each rank holds a slice. The pair column → row needs one sum, at its end.

    y = act(x Aᵀ) Bᵀ:   A cut by its rows, B by its columns;   rank r:  act(x A_rᵀ) B_rᵀ   is its part of the sum y

A weight of torch.nn.Linear has the shape (out, in): to cut a layer's outputs, one cuts the weight's rows. As the layer
computes x Wᵀ, these are the columns of the matrix that x is multiplied by, hence "column-parallel".
"""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_everywhere
from scratch_ddp.common.tensors import checksum
from scratch_ddp.common.wrapper import Group, process_group
from scratch_ddp.tensor_parallel.moves import move, own_ids, slices_of
from scratch_ddp.tensor_parallel.parallelize import parallelize
from scratch_ddp.tensor_parallel.sliced import SlicedParameter, gather_full_grads, gather_full_params

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS += ("_post_accumulate_grad_hooks",)  # of its parameters
_TOKENS = "all ranks of a tensor-parallel group work on the same tokens, but these were given different ones"


class ParallelLayer(nn.Module):
    """What the layers have in common: views of this rank's part of a plain layer's parameters, for `parallelize`.

    `cuts` says along which dimension each sliced parameter is cut; the others are the plain layer's own. Raises
    ValueError for a plain layer that computes something else, or n ranks can't hold equal slices of.
    """

    made_of: ClassVar[type[nn.Module]]
    cuts: ClassVar[Mapping[str, int]]

    def __init__(self, plain: nn.Module, group: Group):
        super().__init__()
        self.group = process_group(group)
        self._check(plain)
        for name in ("weight", "bias"):
            parameter = getattr(plain, name, None)
            self.register_parameter(name, None if parameter is None else self._part(name, parameter))

    def _part(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        if name not in self.cuts:
            return whole
        mine = slices_of(whole.detach(), self.group, self.cuts[name])[dist.get_rank(self.group)]
        part = SlicedParameter(mine, whole.requires_grad)
        part.sliced_over, part.sliced_dim = self.group, self.cuts[name]
        return part

    def _check(self, plain: nn.Module) -> None:
        own_forward = getattr(plain.forward, "__func__", None) is not self.made_of.forward
        hooked = any(getattr(each, hooks, None) for each in (plain, *plain.parameters()) for hooks in _HOOKS)
        if own_forward or plain._modules or hooked:
            what, its = f"{type(self).__name__} is made of a plain {self.made_of.__name__}", type(plain).__name__
            raise ValueError(f"{what}: this {its} has a forward, hooks or modules of its own, which would be lost")
        for option in ("sparse", "max_norm", "scale_grad_by_freq"):
            if getattr(plain, option, None):
                raise ValueError(f"an embedding with {option}={getattr(plain, option)!r} can't be sliced")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("slices can't be pickled or copied, since they belong to a group of ranks: take the state dict")

    @classmethod
    def from_linear(cls, plain: nn.Module, group: Group = None, **options: Any) -> Self:
        """Return cls(plain, group, **options) of a copy, made by `parallelize`: so the first rank's values win."""
        model = nn.ModuleDict({"layer": deepcopy(plain)})
        return parallelize(model, {"layer": partial(cls, **options)}, group)["layer"]

    from_embedding = from_linear
    gather_full_params, gather_full_grads = gather_full_params, gather_full_grads  # the plain layer's, on every rank


class ColumnParallelLinear(ParallelLayer):
    """A linear layer of which each rank computes its slice of the outputs: it holds those rows of weight and bias.

    `from_linear(linear, group)` makes it of a plain layer. `group`: a process group, a dimension of a mesh
    (`mesh["tp"]`), or None for all ranks.
    Input: (…, in), whole. Output: this rank's slice (…, out / n); whole with `gather_output`.
    `input_move`: what is done with the input first. "copy" makes its gradient whole; "gather" takes slices of tokens,
    (…, tokens / n, in); None leaves it to the caller, as where several layers share one input (see `move_input`).
    Cost, "copy": nothing in forward, one all-reduce of the input's gradient in backward. "gather": an all-gather and a
    reduce-scatter. `gather_output`: one more all-gather, in forward.
    """

    made_of, cuts = nn.Linear, {"weight": 0, "bias": 0}

    def __init__(self, linear: nn.Linear, group: Group = None, gather_output=False, input_move: str | None = "copy"):
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

    def __init__(self, linear: nn.Linear, group: Group = None, input_is_parallel=True, output_move: str = "reduce"):
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

    `from_embedding(embedding, group)` makes it of a plain one.
    Input: the same ids (…, tokens) on every rank; ids outside of the vocabulary raise, as in one process. Output:
    (…, tokens, features), whole; with `output_move` "reduce_scatter" slices of tokens, with None partial sums.
    Raises ValueError on every rank if the ids of the first forward are not the same on all ranks.
    Cost: one all-reduce of the output, and a small one in the first forward. Nothing in backward.
    """

    made_of, cuts = nn.Embedding, {"weight": 0}

    def __init__(self, embedding: nn.Embedding, group: Group = None, output_move: str | None = "reduce"):
        super().__init__(embedding, group)
        self.output_move, rows = output_move, len(self.weight)
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - dist.get_rank(self.group) * rows
        self.padding_idx = padding if 0 <= padding < rows else None  # its row gets no gradient
        self.has_compared = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.has_compared:
            line = f"ids {tuple(ids.shape)} that begin {ids.flatten()[:4].tolist()}, {checksum(ids)}"
            check_everywhere([line], _TOKENS, self.group)
            self.has_compared = True
        here, others = own_ids(ids, len(self.weight), self.group)
        y = nn.functional.embedding(here, self.weight, self.padding_idx)
        return move(y.masked_fill(others.unsqueeze(-1), 0), self.output_move, self.group)
