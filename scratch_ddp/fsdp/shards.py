"""The core of sharded training, first half: a rank's rows of some parameters; the whole of them is gathered and freed.

    gather()  start the all-gather of every rank's rows
    use()     wait for it: the parameters have their values
    free()    the memory goes back: what stays is this rank's rows

The second half, what becomes of the gradients, is in `gradients`.
"""

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.fsdp.comm import Comm, Pending
from scratch_ddp.fsdp.freed_parameter import mark, readable, refuse_reading
from scratch_ddp.fsdp.layout import lay_out


class Shards:
    """The parameters of one unit that have one dtype, by name; each is cut on dim 0 over the ranks of `group`.

    `part` is what this rank keeps: one flat tensor in the parameters' own dtype, of which `shards` are views. The
    wrapped model's parameters are views of `whole`, whose memory is there only from `gather` to `free`. `whole` and
    all messages have `compute_dtype`.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], group: dist.ProcessGroup | None, compute_dtype: torch.dtype
    ):
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.comm = Comm(group, next(iter(parameters.values())).device)
        self.group, self.rank, self.world_size = group, self.comm.rank, self.comm.world_size
        self.dtype, self.compute_dtype = self.parameters[0].dtype, compute_dtype
        self.rows, size = lay_out((parameter.shape for parameter in self.parameters), self.world_size)
        self.part = torch.zeros(size, dtype=self.dtype, device=self.parameters[0].device)
        self.shards = [
            nn.Parameter(rows.shard(self.part, self.rank), requires_grad=parameter.requires_grad)
            for rows, parameter in zip(self.rows, self.parameters, strict=True)
        ]
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.arrival: Pending | None = None  # while an all-gather is under way
        self.is_here = True  # until `attach`, the model has its values where it always had them

    def attach(self) -> None:
        """Let the model's parameters be views of `whole`, and free it, and with it the memory that they had."""
        sizes = [rows.whole_size(self.world_size) for rows in self.rows]
        self.whole = self.part.new_empty(sum(sizes), dtype=self.compute_dtype)
        self.wholes = self.whole.split(sizes)
        for name, rows, parameter, whole in zip(self.names, self.rows, self.parameters, self.wholes, strict=True):
            mark(parameter, name)
            parameter.data = rows.values(whole)
        self.arrival = None
        self.free()

    def gather(self) -> None:
        """Start to gather the whole parameters, unless they are here or on their way. One all-gather."""
        if not self.is_here and self.arrival is None and self.part.numel():
            self.arrival = self.comm.all_gather(self.part.to(self.compute_dtype))

    def use(self) -> None:
        """Wait until the whole parameters are here."""
        self.gather()
        self._await_arrival()
        for parameter in self.parameters:
            readable(parameter)
        self.is_here = True

    def free(self) -> None:
        """Give the memory of the whole parameters back. They raise when they are read, until the next `use`."""
        self._await_arrival()  # if they were gathered, since other ranks needed them, and not used here
        for parameter in self.parameters:
            refuse_reading(parameter)
        self.whole.untyped_storage().resize_(0)
        self.is_here = False

    def _await_arrival(self) -> None:
        if self.arrival is not None:
            message = self.arrival.wait()
            # The same storage as ever, so that what autograd has saved of the parameters has its values again too.
            self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
            for rows, whole in zip(self.rows, self.wholes, strict=True):
                rows.read(message, whole)
            self.arrival = None

    def settle(self) -> None:
        """Take over what the caller may change between passes: a shard's `.data`, and what is trained."""
        for i, (parameter, shard) in enumerate(zip(self.parameters, self.shards, strict=True)):
            mine = self.rows[i].shard(self.part, self.rank)
            if shard.data_ptr() != mine.data_ptr() and shard.shape == mine.shape and shard.dtype == mine.dtype:
                mine.data.copy_(shard.detach())
                shard.data = mine
            if parameter.requires_grad != shard.requires_grad:  # the one that was changed has its say
                wanted = not self.trained[i]
                parameter.requires_grad_(wanted)
                shard.requires_grad_(wanted)
            self.trained[i] = shard.requires_grad

    def problem(self) -> str | None:
        """Say what keeps these parameters from being gathered, or return None."""
        for name, rows, parameter, shard in zip(self.names, self.rows, self.parameters, self.shards, strict=True):
            if shard.dtype != self.dtype or shard.shape != (len(rows.of_rank(self.rank)), *rows.shape[1:]):
                return (
                    f"the shard of {name!r} has become {shard.dtype} {tuple(shard.shape)}: change its values in place"
                )
            if self.is_here and parameter.untyped_storage()._cdata != self.whole.untyped_storage()._cdata:
                return f"the values of {name!r} were replaced after the model was wrapped: move or convert it before"
        return None
