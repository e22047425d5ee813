"""`linked_group`: the ranks of a group on a simulated link."""

import contextlib
import datetime
import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

from scratch_ddp.common.agreement import raise_everywhere
from scratch_ddp.instruments.cost.wire import ring_bytes, ring_rounds
from scratch_ddp.instruments.network.clock import now
from scratch_ddp.instruments.network.link import Link, as_link
from scratch_ddp.instruments.network.nic import Board, Nic, Transfer, shared_board
from scratch_ddp.instruments.network.work import Alarm, LinkedWork
from scratch_ddp.instruments.traffic.calls import METHODS, Call, read_method

# FOLDED: Making a group known to torch.distributed, as `new_group` does for those that it makes.


def register(
    group: dist.ProcessGroup, name: str, ranks: list[int], backend: str, backend_config: str, store: dist.Store
) -> None:
    """Enter `group` into torch's tables: `ranks` are the global numbers of its ranks, in their order in the group."""
    world = dist.distributed_c10d._world
    group._set_group_name(name)
    _register_process_group(name, group)
    world.pg_map[group] = (dist.Backend(backend), store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = backend_config
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)


def unregister(group: dist.ProcessGroup) -> None:
    """Take `group` out of torch's tables again; nothing happens if it is in none."""
    world = dist.distributed_c10d._world
    if group not in world.pg_map:
        return
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for each in ("", tag):
        if group in world.tags_to_pg.get(each, []):
            world.tags_to_pg[each].remove(group)
    _unregister_process_group(world.pg_names.pop(group))


def free_name(stem: str) -> str:
    """A name that no group has: the stem and a number."""
    taken = set(dist.distributed_c10d._world.pg_names.values())
    return next(name for number in range(len(taken) + 1) if (name := f"{stem} {number}") not in taken)


def make_default(group: dist.ProcessGroup) -> None:
    """Let a registered group be the default one."""
    dist.distributed_c10d._update_default_pg(group)


# FOLDED: A process group whose operations take time on a simulated link, around a group that carries them out.

_FIRST_TYPE = 200  # of our backends, among the types that torch numbers


class LinkedGroup(dist.ProcessGroup):
    """A process group on a link: `below` moves the data, and each operation is held until its transfer is through.

    Made by `linked_group` and `lone_rank`. Set `link` to another Link, a preset's name or None (no link: operations
    go straight to the group below); what is under way is not affected. Ranks may set different ones: each has its own
    end. `transfers` lists what this rank's end carried, `busy_seconds` for how long.
    """

    def __init__(self, below: dist.ProcessGroup, rank: int, size: int, link: Link | None, board: Board | None = None):
        super().__init__(rank, size)
        self.below, self._own_rank, self._own_size = below, rank, size
        self._link, self._board = link, board
        self._nic, self._alarm = Nic(), Alarm()
        self._free: Callable[[Any], None] | None = None
        self._generation, self._name = 0, ""
        self.adopt_backends()

    @property
    def link(self) -> Link | None:
        """The link, or None if there is none."""
        return self._link

    @link.setter
    def link(self, link: Link | str | None) -> None:
        self._link = as_link(link)

    @property
    def transfers(self) -> list[Transfer]:
        """What this rank's end of the link carried, in the order in which it was posted. Clear the list as you like."""
        return self._nic.transfers

    @property
    def busy_seconds(self) -> float:
        """For how long this rank's end of the link carried something, of the transfers in the list."""
        return self._nic.busy_seconds

    def size(self) -> int:
        return self._own_size

    def rank(self) -> int:
        return self._own_rank

    def getBackendName(self) -> str:  # torch's name
        return "linked"

    @property
    def group_name(self) -> str:
        """The name that the group has, or had last, in torch's tables; empty until it is in them."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def shutdown(self) -> None:
        """What `destroy_process_group` calls: the group below goes with this one, and what is on its way has come."""
        self._alarm.ring_now()
        _ = self.group_name  # torch takes it out of its tables first, and then asks for the name that was in them
        if isinstance(self.below, dist.ProcessGroup):
            self.below.shutdown()
            unregister(self.below)

    def follow(self, group: dist.ProcessGroup | None) -> None:
        """Let a Stop end waits here as in `group`, and start over with it. Only the groups of rank cells do either."""
        if hasattr(group, "wrappers"):
            group.wrappers.add(self)
            self._free = group.free_when_interrupted

    def start_over(self) -> None:
        """The group that this one follows was renewed: what was under way is given up, a backend below is another."""
        self._nic.clear_queue()
        self._alarm.ring_now()
        if self._board is not None:
            self._board.start_over()
        self.adopt_backends()

    def adopt_backends(self) -> None:
        """Register the backends of the group below: some calls of C++ reach for them past the methods below."""
        for device in self.below._device_types:
            # torch keeps the first backend it was given of each type, so every generation is a type of its own
            kind = dist.ProcessGroup.BackendType(_FIRST_TYPE + self._generation)
            self._register_backend(device, kind, self.below._get_backend(device))
            self._set_default_backend(kind)
        if self.group_name:
            self._set_group_name(self.group_name)  # registering forgets it
        self._generation += 1

    def _run(self, method: str, args: tuple, kwargs: dict[str, Any]) -> dist.Work:
        posted = now()  # first of all: what follows takes time of its own
        operate = getattr(self.below, method)
        if self._own_size == 1:
            return operate(*args, **kwargs)  # nothing leaves the rank
        call = read_method(method, self, [*args, *kwargs.values()])
        link, transfer = self._link, None
        if link is not None:
            nbytes = link_bytes(call, args)
            transfer = self._nic.book(call.name, nbytes, posted, link.seconds(nbytes, _rounds(call)))
        places = self._say_ready(call, transfer)
        try:
            below = operate(*args, **kwargs)
        except BaseException:
            self._take_back(call, transfer, places)
            raise
        if transfer is None or below is None:
            return below
        settle = functools.partial(self._settle, call, transfer, places)
        return LinkedWork(below, transfer, settle, self._nic.clear_queue, self._alarm, self._free)

    def _say_ready(self, call: Call, transfer: Transfer | None) -> list[int] | None:
        """Tell the peers from when on this rank's wire is free for the call, before they can be through with it."""
        if self._board is None or (call.peer is None and call.name == "recv"):  # from whoever comes first
            return None
        return self._board.ready(call, transfer.started if transfer else now())

    def _take_back(self, call: Call, transfer: Transfer | None, places: list[int] | None) -> None:
        if transfer is not None:
            self._nic.forget(transfer)
        if places is not None:
            self._board.take_back(call)

    def _settle(self, call: Call, transfer: Transfer, places: list[int] | None, below: dist.Work) -> None:
        """The data is here, so every rank that matters has said when it was ready: when did the transfer begin?"""
        if self._board is None:
            return
        if places is None:
            call.peer = below._source_rank()
            places = self._board.ready(call, transfer.started)
        self._nic.put_off(transfer, self._board.begins(places))


def _operation(method: str) -> Callable[..., dist.Work]:
    def operate(self: LinkedGroup, *args: Any, **kwargs: Any) -> dist.Work:
        __tracebackhide__ = True  # in a rank cell learners see their own line, not this one
        return self._run(method, args, kwargs)

    operate.__name__ = method
    return operate


for _method in METHODS:
    setattr(LinkedGroup, _method, _operation(_method))


def link_bytes(call: Call, args: tuple) -> int:
    """Bytes that pass this rank's end of the link: what it sends or what it receives on a ring, whichever is more.

    `args` are the arguments of the group's method; the first holds what is filled.
    """
    if call.name in ("send", "recv", "broadcast", "reduce"):  # on a ring, a rank receives what it hands on
        return call.payload
    at_root, n = call.rank == call.peer, len(call.members)
    if call.name == "gather" and at_root:
        return (n - 1) * call.payload
    if call.name == "scatter" and not at_root:
        return sum(tensor.nbytes for tensor in args[0])
    return ring_bytes(call.name, call.payload, n, call.rank, call.peer)


def _rounds(call: Call) -> int:
    return 1 if call.name in ("send", "recv") else ring_rounds(call.name, len(call.members))


def linked_group(link: Link | str | None, group: dist.ProcessGroup | None = None) -> LinkedGroup:
    """Return a process group of the same ranks as `group` (default: all), whose operations take time on `link`.

    `link` is a Link, a preset's name, or None for none to begin with. The data moves over a group of its own, with what
    `group` uses for tensors in main memory: gloo, or the group of rank cells. Beside NCCL too it is gloo, which copies
    a GPU's tensors to main memory and back: NCCL lets a rank go on before the data is there, so that nobody could say
    when a transfer had ended. Pass the new group wherever torch takes one:

        slow = linked_group("Ethernet 10 Gb")
        dist.all_reduce(tensor, group=slow)
        model = DistributedDataParallel(model, process_group=slow)
        model = fully_shard(model, mesh=DeviceMesh.from_group(slow, "cpu"))
        slow.link = "NVLink 4"                       # another link; None: no link
        dist.destroy_process_group(slow)

    Collective: every rank of `group` calls it. Raises ValueError on every rank if on any rank there is no such
    preset, RuntimeError if there is no process group. Costs a new group and two small object collectives.
    """
    outside = group == dist.GroupMember.NON_GROUP_MEMBER  # what new_group returns to ranks that are not in the group
    if not (group is None or outside or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"a process group or None is needed, not {type(group).__name__} (of a mesh: mesh.get_group())")
    if not dist.is_initialized():
        raise RuntimeError(
            "there is no process group whose ranks could be linked: %dist_init makes one in a notebook, torchrun and "
            "dist.init_process_group() in a script; lone_rank() needs none"
        )
    if outside or dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group: link it on the group's ranks only")
    if isinstance(group or dist.group.WORLD, LinkedGroup):
        raise ValueError("this group is on a link already: set its .link")
    problem, found = None, None
    try:
        found = as_link(link)
    except (ValueError, TypeError) as error:
        problem = str(error)
    raise_everywhere(problem, group)
    ranks = dist.get_process_group_ranks(group)
    below = _twin(group, ranks)
    linked = LinkedGroup(below, dist.get_rank(group), len(ranks), found, shared_board(below))
    world = dist.distributed_c10d._world
    backend, store = world.pg_map[below]
    register(linked, f"{below.group_name} on a link", ranks, backend, world.pg_backend_config[below], store)
    linked.follow(below)
    return linked


def _twin(group: dist.ProcessGroup | None, ranks: list[int]) -> dist.ProcessGroup:
    """A group of the same ranks with the same time limit, over what carries tensors of main memory."""
    whole_world = len(ranks) == dist.get_world_size()
    return dist.new_group(
        ranks,
        timeout=_timeout(group or dist.group.WORLD),
        backend=_backend_on_cpu(group),
        use_local_synchronization=not whole_world,
    )


def _backend_on_cpu(group: dist.ProcessGroup | None) -> str:
    """What the group uses for tensors in main memory; gloo where it has nothing for them, as with NCCL alone."""
    of_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # "cpu:gloo,cuda:nccl"
    return of_device.get("cpu", "gloo")


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    for device in group._device_types:
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(device).options._timeout
    return None
