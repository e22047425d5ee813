"""`linked_group`: put the ranks of a process group on a simulated link. `lone_rank`: one process stands for n."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from scratch_ddp.common.wrapper import local_group
from scratch_ddp.instruments.cost.wire import Link, preset, ring_rounds
from scratch_ddp.instruments.network.clock import now
from scratch_ddp.instruments.network.hosts import Hosts, share_hosts
from scratch_ddp.instruments.network.nic import Nic, ReadyTimes
from scratch_ddp.instruments.network.work import LinkedWork
from scratch_ddp.instruments.traffic.calls import METHODS, Call, read_method

_made = itertools.count()  # lone groups
_FIRST_TYPE = 200  # number of our first backend type; torch's own have lower numbers


class LinkedGroup(dist.ProcessGroup):
    """A process group on a link: the group `below` moves the data, and each operation lasts as long as its transfer.

    Set `link` to another Link, a preset's name or None for no link, on each rank for its own end; transfers under way
    are not affected. `transfers` lists what this rank's end carried, in the order in which it was posted. With `hosts`,
    `link` is that between hosts, and `inside` that in each of them. Without `ready_times`, the rank has no peers.
    """

    group_name = ""  # `register` gives it one, for which torch asks even when the group is gone

    def __init__(
        self,
        below: dist.ProcessGroup,
        link: Link | str | None,
        ready_times: ReadyTimes | None = None,
        hosts: Hosts | None = None,
        inside: Link | str | None = None,
    ):
        super().__init__(below.rank(), below.size())
        self.below, self.hosts, self.inside = below, hosts, preset(inside or Link(0, 0))
        self.link = link
        self.nic = Nic(ready_times)
        self.transfers = self.nic.transfers
        self.give_up = self.nic.give_up  # called when a Stop ends what is under way below
        self._generation = 0
        self.adopt_backends()

    @property
    def link(self) -> Link | None:
        return self._link

    @link.setter
    def link(self, link: Link | str | None) -> None:
        self._link = link and preset(link)

    def getBackendName(self) -> str:  # torch's name
        return "linked"

    def shutdown(self) -> None:
        """Called by `destroy_process_group`: ends what is under way, and destroys the group below."""
        self.give_up()
        if self.below in dist.distributed_c10d._world.pg_map:  # not of a lone rank, and not when all are destroyed
            dist.destroy_process_group(self.below)

    def follow(self, group: dist.ProcessGroup | None) -> None:
        """If `group` is one of rank cells: give up at a Stop, and start over whenever the group does."""
        if hasattr(group, "wrappers"):
            group.wrappers.add(self)
            self.wrappers = group.wrappers  # whatever works in this group starts over with it, too

    def start_over(self) -> None:
        """Called when the group that this one follows was rebuilt: drop what was under way, adopt the new backends."""
        self.give_up()
        if self.nic.ready_times is not None:
            self.nic.ready_times.reset()
        self.adopt_backends()

    def adopt_backends(self) -> None:
        """Register the backends of the group below, since some C++ calls use them directly."""
        for device in self.below._device_types:
            # torch keeps the first backend of each type, so every generation needs a new type
            kind = dist.ProcessGroup.BackendType(_FIRST_TYPE + self._generation)
            self._register_backend(device, kind, self.below._get_backend(device))
            self._set_default_backend(kind)
        if self.group_name:
            self._set_group_name(self.group_name)  # registering a backend resets the name
        self._generation += 1

    def _run(self, method: str, *args: Any, **kwargs: Any) -> dist.Work:
        __tracebackhide__ = True  # rank cells show the learner's own line instead
        posted = now()  # first, since the rest takes time too
        operate = getattr(self.below, method)
        if self.size() == 1:
            return operate(*args, **kwargs)  # no data leaves the rank
        given, link = [*args, *kwargs.values()], self.link or Link(0, 0)
        call = read_method(method, self, given)
        nbytes = link_bytes(call, given)
        if self.hosts is None:
            seconds = link.seconds(nbytes, ring_rounds(call.name, self.size()))
        else:
            seconds = self.hosts.seconds(call, nbytes, link, self.inside)
        transfer = self.nic.book(call, nbytes, posted, seconds)  # the peers must know before the call can end anywhere
        below = operate(*args, **kwargs)
        if self.hosts is not None:
            self.hosts.count(call)
        if self.nic.ready_times is None and any(getattr(each, "reduceOp", None) == dist.ReduceOp.SUM for each in given):
            for output in tree_leaves(args[0]):
                output.mul_(self.size())
        return below and LinkedWork(self.nic, below, args[0] if args else [], call, transfer)


for _method in METHODS:
    setattr(LinkedGroup, _method, partialmethod(LinkedGroup._run, _method))


def link_bytes(call: Call, given: list) -> int:
    """Bytes that this rank sends or receives, whichever is more. `given`: to the method, the output first."""
    if call.name in ("send", "recv", "broadcast", "reduce", "barrier"):  # on a ring, a rank receives what it passes on
        return call.payload
    outputs = sum(tensor.nbytes for tensor in tree_leaves(given[0]))
    kept = min(call.payload, outputs) if call.kept is None else call.kept  # of the outputs: what was this rank's own
    return max(call.sent, outputs - kept)


def linked_group(
    link: Link | str | None,
    group: dist.ProcessGroup | None = None,
    hosts: Sequence[int] | Hosts | None = None,
    inside: Link | str | None = None,
) -> LinkedGroup:
    """Return a process group of the same ranks as `group` (default: all), whose operations take time on `link`.

    `link` is a Link, a preset's name, or None for no link at first; set the group's `.link` later to change it. The
    data moves over a new group with the backend that `group` uses for tensors in main memory; for NCCL that is gloo.

    By default each rank has a network card of its own. With `hosts`, what leaves or enters a host passes its one card,
    which no other group uses, and `inside` connects the ranks of a host (None: in no time). `hosts` is the host of
    each rank, such as (0, 1, 0, 1), or another linked group's `hosts`, with which this group's bytes are then counted:
    `hosts.bytes_out` is what has left each.

    Every rank of `group` calls it with the same arguments. Raises ValueError if a preset is unknown, if the hosts don't
    fit the ranks, or if not all ranks are on this machine. Costs a new group and two to four small collectives.
    """
    if isinstance(group or dist.group.WORLD, LinkedGroup):
        raise ValueError("this group is on a link already: set its .link")
    link, ranks = link and preset(link), dist.get_process_group_ranks(group)
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))  # "cpu:gloo,cuda:nccl"
    below = local_group(group, backends.get("cpu", "gloo"))
    if hosts is not None and not isinstance(hosts, Hosts):
        hosts = share_hosts(hosts, below)
    linked = LinkedGroup(below, link, ReadyTimes(below), hosts, inside)
    world = dist.distributed_c10d._world
    register(linked, f"{below.group_name} on a link", ranks, world.pg_map[below], world.pg_backend_config[below])
    linked.follow(below)
    return linked


def linked_mesh(link: Link | str, hosts: int, inside: Link | str | None = None) -> DeviceMesh:
    """Return a mesh ("host", "local") of all ranks on a network of two levels, as `linked_group` makes it.

    `mesh["local"]` are the ranks of this rank's host, connected by `inside`; `mesh["host"]` those with the same place
    in each host, connected by `link`, each with its share of the host's card. A further group on the same cards is
    `linked_group(link, hosts=mesh["host"].get_group().hosts, inside=inside)`. Every rank calls it.
    """
    local = dist.get_world_size() // hosts
    shared = share_hosts([host for host in range(hosts) for _ in range(local)], None)
    plain, link = init_device_mesh("cpu", (hosts, local), mesh_dim_names=("host", "local")), preset(link)
    share = replace(link, beta=local * link.beta)
    groups = [linked_group(share, plain.get_group(name), shared, inside) for name in plain.mesh_dim_names]
    return DeviceMesh.from_group(groups, "cpu", mesh=plain.mesh, mesh_dim_names=plain.mesh_dim_names)


def register(
    group: dist.ProcessGroup, name: str, ranks: list[int], backend: tuple[str, dist.Store], config: str
) -> None:
    """Make `group` known to torch as `new_group` does. `ranks`: its global ranks, in the order of the group."""
    world = dist.distributed_c10d._world
    group.group_name = name
    group._set_group_name(name)
    _register_process_group(name, group)
    world.pg_map[group] = backend
    world.pg_names[group] = name
    world.pg_backend_config[group] = config
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)


def lone_rank(world_size: int, link: Link | str | None, rank: int = 0) -> LinkedGroup:
    """Return a process group of `world_size` ranks of which only `rank` exists: this process.

    Every peer is taken to hold the same tensors at the same time, which is right for timing and for averages of equal
    gradients: SUM multiplies by `world_size`, other reductions return them as they are. Use the group like a
    `linked_group`. If there is no default group it becomes the default; otherwise it is an additional group, whose
    absent ranks have numbers that no other rank has. No communication. Raises ValueError for an unknown preset.
    """
    # torch's fake backend sends nothing and copies this rank's tensors to outputs.
    fake = FakeProcessGroup._create_internal(rank, world_size, FakeProcessGroup.Options())
    below = dist.ProcessGroup(rank, world_size)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        below._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)
    below._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group = LinkedGroup(below, link)
    is_first = not dist.is_initialized()
    own_number = rank if is_first else dist.get_rank()
    others = (number for number in range(world_size + 1) if number != own_number)
    numbers = [own_number if each == rank else next(others) for each in range(world_size)]
    config = "cpu:lone,cuda:lone" if torch.cuda.is_available() else "cpu:lone"
    register(group, f"lone rank {next(_made)}", numbers, ("lone", dist.HashStore()), config)
    if is_first:
        dist.distributed_c10d._update_default_pg(group)
    else:
        group.follow(dist.group.WORLD)
    return group
