"""The process group of rank cells: gloo, but a rank that waits in it can be interrupted, and the group renewed.

Every operation is handed to gloo as usual, and waited for there. A Stop that finds ranks in a wait ends gloo's
connections, and `renew_groups` puts a fresh gloo group inside each interruptible group. So everything that holds the
interruptible group (other groups, meshes, wrapped models) goes on working.

Importing this module registers the backend "interruptible".
"""

import datetime
import functools
import json
import secrets
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.cells.flight_recorder import describe_call
from scratch_ddp.cells.rank.interruptible_work import (
    Connections,
    InterruptibleWork,
    describe_given,
    make_call,
    pieces_of,
    wait_in_store,
)

BACKEND = "interruptible"
# gloo's operations, and what learners call them
_OPERATIONS = {
    **{"broadcast": "broadcast", "reduce": "reduce", "barrier": "barrier", "send": "send", "recv": "recv"},
    **{"gather": "gather", "scatter": "scatter", "reduce_scatter": "reduce_scatter", "recv_anysource": "recv"},
    **{"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "alltoall": "all_to_all"},
    **{"allgather": "all_gather", "allgather_coalesced": "all_gather_coalesced"},
    **{"_allgather_base": "all_gather_into_tensor", "_reduce_scatter_base": "reduce_scatter_tensor"},
    "alltoall_base": "all_to_all_single",
}
# Newer names of torch for the same operations of gloo.
_ALIASES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
# Several operations in one call. gloo's own class lacks them. torch's base class calls gloo while it holds the
# interpreter's lock, for which a thread of gloo may wait: sooner or later that is a deadlock.
_COALESCED = {
    "all_gather_single_coalesced": "_allgather_base",
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
# Ranks may rightly pass different sizes to these, so only dtypes are compared.
_MAY_DIFFER = ("allgather", "allgather_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "reduce_scatter")
_FROM_ANY = "from any rank"

# Called with each operation as it begins (a "call" of `interruptible_work`).
observers: list[Callable[[dict[str, Any]], None]] = []
# Called before that, with whether it is a collective: a Stop holds ranks there (see `stop`).
gates: list[Callable[[bool], None]] = []

_renewal_store: dist.Store | None = None  # where ranks announce that they renew
_left_behind: list[dist.ProcessGroupGloo] = []  # groups in which something never ends
_generation = 0  # how many times the groups have been renewed; the same on every rank
# Weak references: unlike a WeakSet they can be listed while another thread adds one.
_groups: "set[weakref.ref[InterruptibleGroup]]" = set()


class InterruptibleGroup(dist.ProcessGroup):
    """A process group around gloo. Every operation of torch.distributed, DTensor, FSDP2, pipelining goes through it."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta):
        super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        # What gloo was given since the last renewal: collectives (""), messages ("0>1"), calls of new_group.
        self.begun: Counter[str] = Counter()
        self.numbered = 0  # the same, with those that were refused because ranks called different things
        self.renewals = -1  # how often a Stop has put another group of gloo inside: what was under way never arrives
        self.retired = False
        self.rests = False  # kept for a later check, until which no Stop concerns it
        self._gloo: Connections | None = None  # its `made` is the group of gloo
        self.wrappers: weakref.WeakSet[Any] = weakref.WeakSet()  # groups around this one, which start over with it
        self.renew()
        _groups.add(weakref.ref(self, _groups.discard))

    def renew(self, suffix: str = "") -> None:
        """Put a fresh gloo group inside. Collective: every rank of the group calls it in the same generation.

        `suffix` keeps groups apart to which different ranks have given the same name.
        """
        first = self._gloo is None
        name = "" if first else self.group_name
        self._end_gloo()
        store = dist.PrefixStore(f"generation {_generation}{suffix}", self._store)
        if self.rank() == 0:
            store.set("uid", secrets.token_hex(4))
        call = make_call("new_group" if dist.is_initialized() else "init_process_group", name)
        store.set(f"rank {self.rank()} is here", "")  # gloo's own wait for the others could not be ended
        wait_in_store(store, [f"rank {rank} is here" for rank in range(self.size())], self._timeout, call)
        self._gloo = Connections(lambda: dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._timeout))
        self.uid = int(store.get("uid"), 16)  # the same on all of its ranks, and no other group's
        if first:
            self._register_bypass(store)
        self.begun.clear()
        self.numbered = 0
        self.renewals += 1
        for wrapper in list(self.wrappers):
            wrapper.start_over()

    def _register_bypass(self, store: dist.Store) -> None:
        """Give torch a group of gloo, which it asks for its abilities. It would connect when it is first used.

        torch 2.13 and 2.14 bring all operations to the methods below, so none goes through this group.
        """
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_lazy_device()], 1, self._timeout
        bypass = dist.ProcessGroupGloo(dist.PrefixStore("bypass", store), self.rank(), self.size(), options)
        kind = dist.ProcessGroup.BackendType.GLOO
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            self._register_backend(torch.device(device), kind, bypass)
        self._set_default_backend(kind)

    def end_connections(self) -> None:
        """Who waits in this group gets an error."""
        if self._gloo is not None:
            self._gloo.end()

    def _end_gloo(self) -> None:
        """Who waits in it gets an error, and it is gone; it stays if a collective goes on in it (rare)."""
        if self._gloo is not None:
            self.end_connections()
            if _await_ends(self.under_way(), seconds=1.0):
                _left_behind.append(self._gloo.made)  # its end would wait for them
            self._gloo.messages.clear()
            self._gloo.made = None

    def under_way(self) -> list[InterruptibleWork]:
        """The collectives that have not ended, and the messages that may come from any rank, which nobody counts."""
        return [work for work in list(self._gloo.works) if not work.is_completed()]

    def retire(self) -> None:
        """Refuse every further operation: some rank of this group has lost it."""
        self.retired = True
        self._end_gloo()

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    def _start(self, operation: str, args: tuple, kwargs: dict, coalesced: bool = False) -> InterruptibleWork:
        if self.retired:
            raise RuntimeError(
                f"process group {self.group_name!r} was made before a rank was replaced, and the new rank does not "
                "know it: make the group (or mesh) again"
            )
        for gate in gates:
            gate("send" not in operation and "recv" not in operation)
        way, details = self._peer(operation, args) or ("", {"number": self.numbered})
        self.numbered += not way
        call = make_call(
            _OPERATIONS[operation],
            self.group_name,
            given=describe_given(args, operation in _MAY_DIFFER),
            uid=self.uid,
            key=self._key(way),
            position=self.begun[way],
            **details,
            **self._op_and_root(operation, (*args, *kwargs.values())),
        )
        if operation == "alltoall_base":
            call["pieces"] = self.rank(), *pieces_of(self.size(), *args[:4])
        if operation == "allgather":
            call["passed"] = describe_given(args[1:], dtype_only=False)
        for observe in observers:
            observe(call)
        start = getattr(self._gloo.made, operation)
        if coalesced:
            outputs, inputs, *options = args
            works = [start(*pair, *options, **kwargs) for pair in zip(outputs, inputs, strict=True)]
        else:
            works = [start(*args, **kwargs)]
        work = InterruptibleWork(works, call, self._gloo)
        if way and way != _FROM_ANY:
            self._gloo.messages.append(work)
        else:
            works = self._gloo.works
            if works:
                works -= {each for each in works if each.is_completed()}
            works.add(work)
        self.begun[way] += 1
        return work

    def _key(self, way: str) -> str:
        """Under which name a call of this group is counted, on all ranks the same (see `place`)."""
        return f"{self.uid} {way}".strip()

    def _op_and_root(self, operation: str, args: tuple) -> dict[str, str]:
        """What torch's options of an operation say in words: {"op": " (SUM)", "root": " from rank 0"}."""
        found = {}
        options = args[-1] if args else None
        if (op := getattr(options, "reduceOp", None)) is not None:
            found["op"] = f" ({op.op.name})"
        if (root := getattr(options, "rootRank", None)) is not None:
            way = "to" if operation in ("reduce", "gather") else "from"
            found["root"] = f" {way} rank {dist.get_global_rank(self, root)}"
        return found

    def _peer(self, operation: str, args: tuple) -> tuple[str, dict[str, Any]] | None:
        """Which way a message goes, and what its call says of the other side; None for a collective."""
        if operation == "recv_anysource":
            return _FROM_ANY, {"number": -1, "peer": " from any rank"}  # ranks send different numbers of messages
        if operation not in ("send", "recv"):
            return None
        if not 0 <= args[1] < self.size():
            raise ValueError(f"there is no rank {args[1]} among {self.size()}")  # gloo would end the process
        here, peer = dist.get_rank(), dist.get_global_rank(self, args[1])
        if operation == "send":
            return f"{here}>{peer}", {"number": -1, "peer": f" to rank {peer}", "ranks": [peer]}
        return f"{peer}>{here}", {"number": -1, "peer": f" from rank {peer}", "ranks": [peer]}


@functools.cache
def _lazy_device() -> dist.ProcessGroupGloo.Device:
    """One for all groups, with one thread."""
    return dist.ProcessGroupGloo.create_default_device(lazy_init=True)


def _operation(name: str, coalesced: bool) -> Callable[..., InterruptibleWork]:
    def call(self: InterruptibleGroup, *args: Any, **kwargs: Any) -> InterruptibleWork:
        __tracebackhide__ = True
        return self._start(name, args, kwargs, coalesced)

    call.__name__ = name
    return call


for _alias, _name in ({name: name for name in _OPERATIONS} | _ALIASES | _COALESCED).items():
    setattr(InterruptibleGroup, _alias, _operation(_name, coalesced=_alias in _COALESCED))


dist.Backend.register_backend(BACKEND, InterruptibleGroup, devices=["cpu", "cuda"])


def open_calls(patience: float = 0.0) -> dict[str, Any]:
    """The collectives under way, and how far this rank has come: {"open": [...]} and `place`.

    Waits up to `patience` seconds for what is about to end.
    """
    works = [work for group in _current_groups() for work in group.under_way()]
    open_ = [
        work.call | {"words": describe_call(work.call), "ranks": ranks_of(work.call), "awaited": work.awaited}
        for work in _await_ends(works, patience)
    ]
    return {"open": open_, **place()}


def _await_ends(works: list[InterruptibleWork], seconds: float) -> list[InterruptibleWork]:
    """Wait until all of them have ended, but no longer than `seconds` in all. Returns those that have not."""
    deadline = time.monotonic() + seconds
    while (works := [work for work in works if not work.is_completed()]) and time.monotonic() < deadline:
        time.sleep(0.002)
    return works


def awaited_in_native_code() -> dict[str, Any] | None:
    """The oldest call that has not ended: what torch's DDP waits for, inside C++."""
    calls = [work.call for group in _current_groups() for work in group.under_way()]
    return min(calls, key=lambda call: call["serial"], default=None)


def end_connections() -> None:
    """End every wait in a process group (called by a thread that is not stuck). The groups must be renewed then."""
    for group in _current_groups():
        group.end_connections()
    give_up()


def give_up() -> None:
    """A Stop ends a cell: groups around these drop what is under way in them alone, as on a simulated wire."""
    for group in _current_groups():
        for wrapper in list(group.wrappers):
            getattr(wrapper, "give_up", lambda: None)()


def place() -> dict[str, Any]:
    """How far this rank has come: {"begun": {what: how often}, "members": {what: the ranks that count it}}.

    The keys are the same on all ranks: "17" for the collectives in the group with that uid, "17 0>1" for messages.
    """
    begun, members = {}, {}
    for group in _current_groups():
        ranks = dist.get_process_group_ranks(group)
        for way, count in [("", group.begun[""]), *list(group.begun.items())]:
            if way != _FROM_ANY:  # no sender counts these
                key = group._key(way)
                begun[key], members[key] = count, list(map(int, way.split(">"))) if ">" in way else ranks
    return {"begun": begun, "members": members}


def ranks_of(call: dict[str, Any]) -> list[int] | None:
    """Who takes part in a call, by their numbers among all; None if this process has no such group now."""
    for group, name in list(dist.distributed_c10d._world.pg_names.items()):
        if name == call["group"]:
            return call["ranks"] or dist.get_process_group_ranks(group)
    return None


def _current_groups() -> "list[InterruptibleGroup]":
    """Without those that were retired or destroyed, or that rest."""
    registered = dist.distributed_c10d._world.pg_group_ranks
    groups = [group for reference in list(_groups) if (group := reference()) is not None]
    return [group for group in groups if not (group.retired or group.rests) and group in registered]


def announce_new_group(ranks: list[int] | None) -> None:
    """This rank is about to call `new_group` with these ranks."""
    default = dist.group.WORLD
    if isinstance(default, InterruptibleGroup):
        for gate in gates:
            gate(True)
        members = list(range(default.size())) if ranks is None else list(ranks)
        number = default.begun["new_group"]  # torch's own count leaves out calls that it has refused
        default.begun["new_group"] += 1
        uid = default.uid ^ 0x80000000  # these are counted apart from the group's collectives
        call = make_call("new_group", "its groups", number=number, given=f"ranks {members}", uid=uid)
        for observe in observers:
            observe(call)


def join(store: dist.Store, rank: int, world_size: int, generation: int = 0) -> None:
    """Make a rank's default group. A rank that replaces another joins in the generation that the others move to."""
    global _generation, _renewal_store
    _generation, _renewal_store = generation, store
    if generation:
        _announce(store, rank, generation, {})
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    if generation:
        _align_group_count(_await_announcements(store, world_size, generation, timeout=10.0))


def renew_groups(timeout: float, generation: int) -> list[str]:
    """Put fresh gloo groups inside all interruptible groups of this process, and abandon what is under way.

    Collective over the default group, but through its store, so it works when the groups themselves are stuck. A
    group that one of its ranks no longer has is retired; their names are returned. Raises TimeoutError, naming the
    ranks that have not called it within `timeout` seconds. `generation` is the same on every rank, and higher at each
    call.
    """
    global _generation
    default = dist.distributed_c10d._get_default_group()
    mine = {group.group_name: group for group in _current_groups()}
    members = {name: dist.get_process_group_ranks(group) for name, group in mine.items() if group is not default}
    _announce(_renewal_store, dist.get_rank(), generation, members)
    announced = _await_announcements(_renewal_store, default.size(), generation, timeout)
    theirs = [announcement["groups"] for announcement in announced]
    _generation = generation
    default.renew()
    retired = []
    for name in sorted(members):  # the same order everywhere: making a group waits for its members
        if all(theirs[member].get(name) == members[name] for member in members[name]):
            mine[name].renew(suffix=f" of {members[name]}")
        else:
            mine[name].retire()
            retired.append(name)
    _align_group_count(announced)
    return retired


def _announce(store: dist.Store, rank: int, generation: int, groups: dict[str, list[int]]) -> None:
    announcement = {"groups": groups, "count": dist.distributed_c10d._world.group_count}
    store.set(f"renewal {generation} of rank {rank}", json.dumps(announcement))


def _await_announcements(store: dist.Store, world_size: int, generation: int, timeout: float) -> list[dict[str, Any]]:
    keys = [f"renewal {generation} of rank {rank}" for rank in range(world_size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout))
    except RuntimeError:  # torch's stores raise this or a subclass of it, depending on the store
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(f"ranks {missing} did not renew their process groups within {timeout:g} s") from None
    return [json.loads(store.get(key)) for key in keys]


def _align_group_count(announced: list[dict[str, Any]]) -> None:
    """torch names groups by counting them. A rank that is new, or was interrupted in new_group, has another count."""
    world = dist.distributed_c10d._world
    world.group_count = max(world.group_count, *(announcement["count"] for announcement in announced))
