"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to the experts they are routed to.

No token is dropped, however unevenly the router chooses.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_everywhere, together
from scratch_ddp.common.replicas import broadcast_from_first, dtype_and_shape, named_tensors
from scratch_ddp.common.tensors import conjugate
from scratch_ddp.common.wrapper import Group, process_group


class ExpertParallel(nn.Module):
    """Each token goes to the `k` experts that its router prefers; their outputs are added, weighted by the softmax.

    `router`: from (tokens, d) to (tokens, experts), on a device from which the group sends; the first rank's values
    win. `experts`: all of them, in the same order on every rank, each from (rows, d) to (rows, d), row by row. Rank r
    keeps the r-th of n equal parts, in `.experts`, whose names are those of the whole layer. `.rows`: how many rows
    each of them had in the last forward.

    Gradients, where the loss is a sum over all ranks' tokens: an expert's is complete, since its tokens came from all
    ranks, and must not be summed again; the router's must be summed over the ranks. Where each rank's loss is a mean of
    its own tokens and the whole loss the mean over ranks, divide both by n. An expert without tokens has gradients of
    zero.

    Raises ValueError on every rank if the ranks give different arguments, if n does not divide the number of experts,
    or if k is not between 1 and that number. Costs one all-reduce of 24 bytes and a broadcast of the router.
    """

    def __init__(
        self,
        router: nn.Module,
        experts: Sequence[nn.Module],
        k: int = 2,
        group: Group = None,
    ):
        super().__init__()
        self.group, self.k, self.n_experts = process_group(group), k, len(experts)
        rank, self.n = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.per_rank, self.rows = self.n_experts // self.n, []
        parts = {"router": router} | {f"expert {i}": expert for i, expert in enumerate(experts)}
        with together(self.group, complaint="the ranks build ExpertParallel from different arguments") as lines:
            shapes = {name: [dtype_and_shape(each) for _, each in named_tensors(part)] for name, part in parts.items()}
            lines += [f"k={k}", *(f"{name} {each}" for name, each in shapes.items())]
            if not experts or len(experts) % self.n:
                raise ValueError(f"{len(experts)} experts can't be shared out to {self.n} ranks equally")
            if not isinstance(k, int) or not 1 <= k <= len(experts):
                raise ValueError(f"k must be a number of experts from 1 to {len(experts)}, not {k!r}")
        broadcast_from_first((each for _, each in named_tensors(router)), self.group)
        mine = range(rank * self.per_rank, (rank + 1) * self.per_rank)
        self.router, self.experts = router, nn.ModuleDict({str(i): experts[i] for i in mine})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mixture for this rank's tokens, `x`: (…, d). Ranks may have different numbers of them, also none.

        Raises ValueError on every rank if the ranks disagree about d, the dtype or `x.requires_grad`.

        Cost: three all-to-alls: the counts (8 bytes an expert), k rows for each token, and their outputs. In backward
        two: the outputs' gradients and, if `x` requires grad, the rows'. Besides, one all-reduce of 24 bytes. The
        processor waits for the counts.
        """
        trained = torch.is_grad_enabled() and x.requires_grad
        lines = [f"{x.dtype}, d = {x.shape[-1]}", f"requires_grad {trained}"]
        check_everywhere(lines, "the ranks call ExpertParallel with different inputs", self.group)
        tokens = x.reshape(-1, x.shape[-1])
        scores = self.router(tokens)
        if scores.shape[-1] != self.n_experts:  # on every rank, as the routers are equal
            raise ValueError(f"the router gives {scores.shape[-1]} columns for {self.n_experts} experts")
        weight, choice = scores.softmax(-1).topk(self.k, -1)
        order = choice.flatten().argsort(stable=True)  # a token's k copies, sorted by expert and so by rank
        token = order // self.k
        leaving = torch.bincount(choice.flatten(), minlength=self.n_experts)
        arriving = torch.empty_like(leaving)  # [j·per_rank + e]: rows from rank j for expert e of this rank
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, received = (counts.view(self.n, -1).sum(1).tolist() for counts in (leaving, arriving))
        rows = _exchange_rows(tokens[token], sent, received, self.group)
        outputs = _exchange_rows(self._run_experts(rows, arriving), received, sent, self.group)
        weighted = outputs * weight.flatten()[order, None]
        return torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, token, weighted).view_as(x)

    def _run_experts(self, rows: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
        """The rows' outputs, in the order of the rows: rank by rank, and expert by expert within a rank."""
        self.rows = arriving.view(self.n, -1).sum(0).tolist()
        expert = torch.arange(self.per_rank, device=rows.device).repeat(self.n).repeat_interleave(arriving)
        order = expert.argsort(stable=True)
        parts = rows[order].split(self.rows)
        done = torch.cat([run(part) for run, part in zip(self.experts.values(), parts, strict=True)])
        done.requires_grad_(torch.is_grad_enabled())  # every rank takes part in backward, one with frozen experts too
        return torch.empty_like(done).index_copy(0, order, done)


def _exchange_rows(
    rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send the first `sent[0]` rows to rank 0, the next `sent[1]` to rank 1, …; return what arrives, rank by rank.

    Gradients travel back the same way.
    """
    return conjugate(rows, partial(_exchange, sent, received, group), partial(_exchange, received, sent, group))


def _exchange(
    sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None, rows: torch.Tensor
) -> torch.Tensor:
    arriving = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arriving, rows.contiguous(), list(received), list(sent), group=group)
    return arriving
