"""A message that is larger than the buffer that it arrives in is an error, and so are collectives that do not match.

gloo alone would end the process.
"""

import contextlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.cells.flight_recorder import describe_call
from scratch_ddp.cells.rank import interruptible_group

NO_SENDER = "recv names no sender: a message of another call can be taken for this one"


class RankThread(threading.Thread):
    """Stands for a rank. It comes to a call of a real group only when its own world is over: that call is dropped."""


@contextlib.contextmanager
def message_sizes_compared(store: dist.Store, prefix: str, part: Callable[[], int] = lambda: 0) -> Iterator[list[str]]:
    """Raise ValueError where a message doesn't fit, on the rank that comes to it second, before gloo hears of it.

    Also where a receive names no sender. A thread that Python code has started is ended at its first call, since there
    the ranks' calls have no common order; the yielded list gets what to say of it. Nobody waits for the other end.
    part: in which of the cases of a call this rank is. A collective matches none of another case.
    Costs one operation on the store per collective, two per message, and two for each other rank in an
    all_to_all_single. Seen is what goes through interruptible groups.
    """
    numbers: Counter[str] = Counter()
    own_rank = dist.get_rank()
    of_threads: list[str] = []

    def compare(call: dict[str, Any]) -> None:
        if isinstance(threading.current_thread(), RankThread):
            raise SystemExit
        if _is_of_python(threading.current_thread()):
            name = call["operation"]
            of_threads.append(f"calls {name} from another thread: then nothing keeps the order that all ranks share")
            raise SystemExit(of_threads[-1])  # a thread prints no traceback of it
        if "pieces" in call:
            compare_pieces(f"{prefix}/{call['group']}/all-to-all {call['number']}", *call["pieces"])
        if not call["peer"]:
            compare_collectives(call["group"], describe_call(call | {"given": call.get("passed", call["given"])}))
        if call["peer"] == " from any rank":
            raise ValueError(NO_SENDER)
        way, _, peer = call["peer"].strip().rpartition(" rank ")
        if not peer.isdigit():
            return
        sends, group = way == "to", call["group"]
        if int(peer) == own_rank:
            raise ValueError(f"rank {own_rank} {'sends to' if sends else 'receives from'} itself")
        ends = (own_rank, int(peer)) if sends else (int(peer), own_rank)
        message = f"{prefix}/{group}/{ends[0]} to {ends[1]}"
        numbers[message] += 1
        mine, other = (f"{message}/{numbers[message]}/{end}" for end in (("out", "in") if sends else ("in", "out")))
        store.set(mine, call["given"])
        if not store.check([other]):
            return
        theirs = store.get(other).decode()
        sent, room = (call["given"], theirs) if sends else (theirs, call["given"])
        if _nbytes(sent) > _nbytes(room):
            raise ValueError(f"rank {ends[0]} sends {sent}, rank {ends[1]} receives into {room}")

    def compare_collectives(group: str, mine: str) -> None:
        numbers[group] += 1
        place = f"{prefix}/{group}/collective {numbers[group]}"
        rank, there, theirs = json.loads(store.compare_set(place, "", json.dumps([own_rank, part(), mine])))
        if there != part():
            early, late = (own_rank, rank) if part() < there else (rank, own_rank)
            raise ValueError(f"rank {late} has come to the next case with fewer calls than rank {early}")
        if theirs != mine:
            raise ValueError(f"rank {own_rank} calls {mine} where rank {rank} calls {theirs}")

    def compare_pieces(place: str, rank: int, sent: list[int], received: list[int]) -> None:
        for other in range(len(sent)):
            store.set(f"{place}/{rank} to {other}/out", str(sent[other]))
            store.set(f"{place}/{other} to {rank}/in", str(received[other]))
            for sender, receiver, theirs in ((rank, other, "in"), (other, rank, "out")):
                key = f"{place}/{sender} to {receiver}"
                if not store.check([f"{key}/{theirs}"]):
                    continue
                out, room = (int(store.get(f"{key}/{end}")) for end in ("out", "in"))
                if out != room:
                    raise ValueError(f"rank {sender} sends {out} elements to rank {receiver}, which expects {room}")

    before = set(threading.enumerate())
    interruptible_group.observers.append(compare)
    try:
        yield of_threads
    finally:
        if _refuse_late_calls not in interruptible_group.observers:
            interruptible_group.observers.append(_refuse_late_calls)
        _left_over.update(filter(_is_of_python, set(threading.enumerate()) - before))
        interruptible_group.observers.remove(compare)


_left_over: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # threads that outlive the call they began in


def _refuse_late_calls(_: dict[str, Any]) -> None:
    """A pool's thread goes through what is left of its work, and would call it in the middle of something else."""
    if threading.current_thread() in _left_over:
        raise SystemExit


def _is_of_python(thread: threading.Thread) -> bool:
    """Neither the main thread nor one of autograd's, which run hooks."""
    return thread is not threading.main_thread() and not isinstance(thread, threading._DummyThread)


def _nbytes(given: str) -> int:
    """Of "4 × float32"."""
    number, _, dtype = given.partition(" × ")
    return int(number) * getattr(torch, dtype).itemsize
