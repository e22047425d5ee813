"""`lone_rank`: one process stands for one rank of n, so that a laptop can time what a rank of 64 does.

There are no peers: every other rank is taken to hold the same tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.instruments.network.link import Link, as_link
from scratch_ddp.instruments.network.linked import LinkedGroup, register

_BACKEND = "lone"


class Done(dist.Work):
    """An operation that has ended already."""

    def __init__(self, tensors: list[Any], source: int = 0):
        super().__init__()
        self._tensors, self._source = tensors, source

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return self._tensors

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


_IDEMPOTENT = {dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR}
_KNOWN = {dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.BXOR} | _IDEMPOTENT


def repeat_(tensor: torch.Tensor, op: dist.ReduceOp, times: int) -> torch.Tensor:
    """Reduce `times` tensors equal to this one, in place. Average, minimum and maximum leave it as it is."""
    kind = dist.ReduceOp.RedOpType(getattr(op, "op", op))
    if kind not in _KNOWN:
        raise ValueError(f"{op} is not known for a rank without peers")
    if kind == dist.ReduceOp.BXOR:
        return tensor if times % 2 else tensor.zero_()
    if kind in _IDEMPOTENT or tensor.dtype == torch.bool:
        return tensor
    return tensor.mul_(times) if kind == dist.ReduceOp.SUM else tensor.pow_(times)


class PeerlessGroup:
    """One rank of a process group of `size` ranks, with the group's methods. Nothing is sent.

    Tensors that depend on other ranks alone (a receive, the output of a scatter from another root) stay unchanged.
    """

    _device_types: Sequence[torch.device] = ()  # no backend of its own

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """Reduce each tensor with `size` − 1 copies of itself, in place."""
        for tensor in tensors:
            repeat_(tensor, opts.reduceOp if opts else dist.ReduceOp.SUM, self._size)
        return Done(tensors)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Done:
        """As `allreduce` if this rank is the root; otherwise nothing."""
        return self.allreduce(tensors, opts) if opts.rootRank == self._rank else Done(tensors)

    def broadcast(self, tensors: list[torch.Tensor], *_: Any) -> Done:
        """Nothing: the root holds the same tensors."""
        return Done(tensors)

    def barrier(self, *_: Any, **__: Any) -> Done:
        """Nothing: there is nobody to wait for."""
        return Done([])

    def send(self, tensors: list[torch.Tensor], *_: Any) -> Done:
        """Nothing: nobody receives the tensors."""
        return Done(tensors)

    def recv(self, tensors: list[torch.Tensor], source: int, *_: Any) -> Done:
        """Nothing: the tensors stay unchanged."""
        return Done(tensors, source)

    def recv_anysource(self, tensors: list[torch.Tensor], *_: Any) -> Done:
        """As `recv`, from the next rank."""
        return Done(tensors, (self._rank + 1) % self._size)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> Done:
        """Copy each input into every place of its list of outputs."""
        for copies, tensor in zip(outputs, inputs, strict=True):
            for copy in copies:
                copy.copy_(tensor)
        return Done(outputs)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_: Any) -> Done:
        """Copy all inputs into each list of outputs, one list per rank."""
        for copies in outputs:
            for copy, tensor in zip(copies, inputs, strict=True):
                copy.copy_(tensor)
        return Done(outputs)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, *_: Any) -> Done:
        """Fill the output with `size` copies of the tensor."""
        for copy in output.view(self._size, -1):
            if copy.data_ptr() != tensor.data_ptr():  # the input may be part of the output
                copy.copy_(tensor.view(-1))
        return Done([output])

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Done:
        """As `allgather` if this rank is the root; otherwise nothing."""
        return self.allgather(outputs, inputs) if opts.rootRank == self._rank else Done(inputs)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Done:
        """Copy this rank's part if it is the root; otherwise the output stays unchanged."""
        if opts.rootRank == self._rank:
            outputs[0].copy_(inputs[0][self._rank])
        return Done(outputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Done:
        """Reduce `size` copies of this rank's part of each list into its output."""
        for output, parts in zip(outputs, inputs, strict=True):
            repeat_(output.copy_(parts[self._rank]), opts.reduceOp, self._size)
        return Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Done:
        """As `reduce_scatter`, for one tensor split into `size` parts."""
        output.view(-1).copy_(tensor.view(self._size, -1)[self._rank])
        repeat_(output, opts.reduceOp, self._size)
        return Done([output])

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *_: Any) -> Done:
        """Copy this rank's own part into every output, since equal peers would send the same."""
        for output in outputs:
            output.copy_(inputs[self._rank])
        return Done(outputs)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, out_sizes: list[int], sizes: list[int], *_: Any
    ) -> Done:
        """As `alltoall`, for one tensor each way, split by the sizes, or evenly."""
        outputs = output.split(out_sizes) if out_sizes else output.chunk(self._size)
        inputs = tensor.split(sizes) if sizes else tensor.chunk(self._size)
        self.alltoall(list(outputs), list(inputs))
        return Done([output])

    def all_gather_single_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *_: Any) -> Done:
        """Several `all_gather_single` in one call."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, tensor)
        return Done(outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> Done:
        """Several `reduce_scatter_single` in one call."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return Done(outputs)

    # other names that torch has for the same operations
    allreduce_coalesced = allreduce
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def lone_rank(world_size: int, link: Link | str | None, rank: int = 0) -> LinkedGroup:
    """Return a process group of `world_size` ranks of which only `rank` exists: this process.

    Every peer is taken to hold the same tensors at the same time, which is right for timing and for averages of equal
    gradients: AVG, MIN and MAX return them bit for bit, SUM multiplies by `world_size`. Use the group like a
    `linked_group`. If there is no default group it becomes the default, until `dist.destroy_process_group()`. Otherwise
    it is an additional group, whose absent ranks have numbers that no other rank has.

    An interrupt ends a wait at once and frees the link. torch's DDP waits in C++, where only the Stop of a rank cell
    reaches it; elsewhere Python handles the interrupt after that wait.

    No communication. Raises ValueError for a world size below 1, a rank outside it, or an unknown preset.
    """
    found = as_link(link)
    if not isinstance(world_size, int) or world_size < 1:
        raise ValueError(f"world_size must be a whole number of ranks, 1 or more, not {world_size!r}")
    if not isinstance(rank, int) or not 0 <= rank < world_size:
        raise ValueError(f"rank must be one of 0 to {world_size - 1}, not {rank!r}")
    group = LinkedGroup(PeerlessGroup(rank, world_size), rank, world_size, found)
    is_first = not dist.is_initialized()
    own_number = rank if is_first else dist.get_rank()
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    config = ",".join(f"{device}:{_BACKEND}" for device in devices)
    numbers = _global_ranks(world_size, rank, own_number)
    register(group, _free_name(), numbers, _BACKEND, config, dist.HashStore())
    if is_first:
        dist.distributed_c10d._update_default_pg(group)
    else:
        group.follow(dist.group.WORLD)
    return group


def _free_name() -> str:
    """A name that no group has."""
    taken = set(dist.distributed_c10d._world.pg_names.values())
    return next(name for number in range(len(taken) + 1) if (name := f"lone rank {number}") not in taken)


def _global_ranks(world_size: int, rank: int, own_number: int) -> list[int]:
    """The global ranks of the group: `own_number` for the one that exists, other numbers for the rest."""
    others = (number for number in range(world_size + 1) if number != own_number)
    return [own_number if each == rank else next(others) for each in range(world_size)]


def _create(store: dist.Store, rank: int, size: int, timeout: object) -> LinkedGroup:
    """Called by torch for a new group among the ranks of a lone one."""
    link = dist.group.WORLD.link if isinstance(dist.group.WORLD, LinkedGroup) else None
    return LinkedGroup(PeerlessGroup(rank, size), rank, size, link)


dist.Backend.register_backend(_BACKEND, _create, devices=["cpu", "cuda"])
