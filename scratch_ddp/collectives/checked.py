"""What stands before every collective here: do all ranks ask for the same thing, and can it be done?

A rank whose argument is wrong must not raise alone, or the others wait for it for ever; and ranks that send each other
different sizes are ended by gloo. So the ranks first compare a digest of what they are about to do, in one all-reduce
of three integers, counted by `traffic` as set-up. Only if they differ is it gathered who said what.
"""

import contextlib
import contextvars
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.agreement import message_device, who_said_what
from scratch_ddp.collectives.arguments import Arguments, staged
from scratch_ddp.collectives.kept_memory import KeptMemory
from scratch_ddp.traffic import set_up

_compared = contextvars.ContextVar("whether ranks compare what they ask for", default=True)
_LARGEST = dist.AllreduceOptions()
_LARGEST.reduceOp = dist.ReduceOp.MAX


def collective(writes: str, reads: str | None = None, root: str | None = None, sums: bool = False) -> Callable:
    """Decorate a collective written for contiguous tensors that all ranks agree on, so that it takes any.

    `writes` and `reads` name the arguments with the result and the input, each a tensor or (`..._list`) one for each
    rank; `root` names the source or destination, outside which lists must be None; `sums`: it adds the tensors up.

    Before the call: every rank raises TypeError or ValueError, with the same text, if any rank's arguments are
    wrong or the ranks disagree. Around the call: tensors that point-to-point can't take are replaced by copies,
    and the results copied back; autograd is off; what it takes with torch.empty_like is kept for the next call.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # IPython then shows the caller's line, not these
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = bound.arguments["group"] = member_group(bound.arguments["group"])
            asked = Arguments(bound.arguments, group, writes, reads, root, sums)
            if _compared.get():
                agree(function.__name__, asked.check, group)
            else:
                asked.check()
            with torch.no_grad(), staged(asked) as arguments, KeptMemory():
                result = function(**arguments)
            return None if result is None else asked.values[writes]

        return checked

    return decorate


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, this thread's calls don't compare what the ranks ask for, which saves a small all-reduce a call.

    For a loop that is known to be right; all ranks go in and out alike. As with torch's own collectives, a rank whose
    argument is wrong raises alone, and ranks that ask for different things wait for each other until the group's time
    is up, or are ended by gloo.
    """
    before = _compared.set(False)
    try:
        yield
    finally:
        _compared.reset(before)


def member_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself, or the default group for None. Raises if this rank is not in it, or there is none."""
    if not dist.is_initialized():
        raise RuntimeError("there is no process group yet: call torch.distributed.init_process_group() first")
    if group is None:
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {dist.get_rank()} is not in the group it passes: only the group's ranks may call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a ProcessGroup or None, not {type(group).__name__} (of a mesh: .get_group())")
    return group


def agree(call: str, check: Callable[[], dict[str, Any]], group: dist.ProcessGroup) -> None:
    """Raise on every rank of `group` alike unless `check()` passes and returns the same facts on all of them.

    Raises TypeError if a rank's check did (and no other failed otherwise), else ValueError; the text names the ranks.
    Cost: one all-reduce of 24 bytes, counted as set-up.
    """
    __tracebackhide__ = True
    error, facts = None, {"call": call}
    try:
        facts |= check()
    except Exception as raised:  # whatever it is, this rank must not raise it alone
        error = (isinstance(raised, TypeError), str(raised))
    digest = int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=7).digest(), "big")
    # The largest digest and the smallest (as the largest negative) are the same if and only if all are.
    vote = torch.tensor([digest, -digest, error is not None], device=message_device(group))
    with set_up():
        group.allreduce([vote], _LARGEST).wait()  # not dist.all_reduce, whose own checks take as long again
        largest, minus_smallest, failed = vote.tolist()
        if largest == -minus_smallest and not failed:
            return
        reports = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, (facts, error), group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), reports, strict=True))
    called = " / ".join(sorted({facts["call"] for facts, _ in reports}))
    errors = {rank: error for rank, (_, error) in by_rank.items() if error is not None}
    if errors:
        kind = TypeError if all(is_type_error for is_type_error, _ in errors.values()) else ValueError
        raise kind(f"{called}: {'; '.join(who_said_what({rank: text for rank, (_, text) in errors.items()}))}")
    facts_of = {rank: facts for rank, (facts, _) in by_rank.items()}
    raise ValueError(f"{called}: the ranks disagree. {_differences(facts_of)}")


def _differences(facts: dict[int, dict[str, Any]]) -> str:
    # Other calls have other facts: then the calls are all there is to say.
    different_calls = len({each["call"] for each in facts.values()}) > 1
    names = ["call"] if different_calls else list(next(iter(facts.values())))
    lines = []
    for name in names:
        said = {rank: each[name] for rank, each in facts.items()}
        if len(set(map(repr, said.values()))) > 1:
            lines.append(f"{name}: {'; '.join(who_said_what(said))}")
    return "; ".join(lines)
