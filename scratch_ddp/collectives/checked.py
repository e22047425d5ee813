"""What comes before and after every collective: do all ranks ask for the same thing, and can it be done?

A rank whose argument is wrong must not raise alone, or the others wait for it for ever; and gloo ends ranks that send
each other different sizes. So the ranks first compare a digest of what they are about to do, in one all-reduce of
three integers, counted as set-up. Only where they differ do they gather what each of them asked for.
"""

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.collectives.scratch import scratch_memory
from scratch_ddp.common.agreement import together
from scratch_ddp.common.wrapper import Group, process_group

_compared = contextvars.ContextVar("whether ranks compare what they ask for", default=True)


def collective(writes: str, reads: str | None = None, root: str | None = None) -> Callable:
    """Decorate a collective written for contiguous tensors that all ranks agree on, so that it takes any tensors.

    `writes` and `reads` name the arguments with the result and the input, each a tensor or (`..._list`) one for each
    rank; `root` names the source or destination.

    Before the call: every rank raises ValueError, with the same text, if any rank's arguments are wrong or the ranks
    disagree. Around the call: tensors that aren't contiguous are replaced by copies, and the results copied back;
    autograd is off.
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True  # IPython then shows the caller's line, not these
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            values = bound.arguments
            values["group"] = member_group(values["group"])
            if _compared.get():
                with together(values["group"], what=function.__name__, complaint="the ranks disagree") as lines:
                    lines += [f"{function.__name__}: {fact}" for fact in _facts(values, writes, reads, root)]
            with torch.no_grad(), scratch_memory():
                given = {name: _contiguous(values[name]) for name in filter(None, (writes, reads))}
                result = function(**values | given)
                _copy_back(given[writes], values[writes])
            return None if result is None else values[writes]

        return checked

    return decorate


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, this thread's calls don't compare what the ranks ask for, which saves one small all-reduce per call.

    For a loop that is known to be right; every rank must enter and leave it. Nothing else is checked either: as with
    torch's own collectives, ranks that ask for different things wait for each other until the group's timeout, or are
    ended by gloo.
    """
    before = _compared.set(False)
    try:
        yield
    finally:
        _compared.reset(before)


def member_group(group: Group) -> dist.ProcessGroup:
    """The group itself, that of a mesh, or for None the default group. Raises as `process_group` does."""
    return process_group(group) or dist.group.WORLD


def _facts(values: Mapping[str, Any], writes: str, reads: str | None, root: str | None) -> list[str]:
    """Return what has to be the same on every rank. Raises ValueError if the call can't be made."""
    members = dist.get_process_group_ranks(values["group"])
    if root and values[root] not in members:
        raise ValueError(f"{root}={values[root]} is not in the group, whose ranks (global ones) are {members}")
    tensors = {}
    for name in filter(None, (writes, reads)):
        value = values[name]
        if not name.endswith("_list"):
            tensors[name] = value
        elif not isinstance(value, (list, tuple)) or len(value) != len(members):
            raise ValueError(f"{name} must be a list of {len(members)} tensors, one for each rank")
        else:
            tensors |= {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
        for here, there in zip(_looks(tensor), _looks(first), strict=True):
            if here != there:
                raise ValueError(f"{name} has {here}, but {first_name} has {there}")
    return [*([f"{root} {values[root]}"] if root else []), *_looks(first)]


def _looks(tensor: torch.Tensor) -> list[str]:
    return [f"shape {tuple(tensor.shape)}", f"dtype {str(tensor.dtype).removeprefix('torch.')}"]


def _contiguous(value: Any) -> Any:
    """The tensor, or each of a list, or a contiguous copy of it."""
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().contiguous()  # the numbers, not a lazily negated view
    return [*map(_contiguous, value)]


def _copy_back(sent: Any, given: Any) -> None:
    """Put results into the caller's own tensors, where they were replaced by copies."""
    if isinstance(sent, list):
        for each, its in zip(sent, given, strict=True):
            _copy_back(each, its)
    elif sent.data_ptr() != given.data_ptr():
        given.copy_(sent)
