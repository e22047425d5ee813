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
from scratch_ddp.common.agreement import check_everywhere
from scratch_ddp.common.wrapper import Group, process_group

_compared = contextvars.ContextVar("whether ranks compare what they ask for", default=True)


def collective(writes: str, reads: str | None = None, root: str | None = None, sums: bool = False) -> Callable:
    """Decorate a collective written for contiguous tensors that all ranks agree on, so that it takes any tensors.

    `writes` and `reads` name the arguments with the result and the input, each a tensor or (`..._list`) one for each
    rank; `root` names the source or destination: on all other ranks lists must be None; `sums`: it adds the tensors up.

    Before the call: every rank raises ValueError, with the same text, if any rank's arguments are wrong or the ranks
    disagree. Around the call: tensors that can't be sent as they are are replaced by copies, and the results
    copied back; autograd is off.
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
            problem, lines, call = None, [], function.__name__
            try:
                facts = _facts(values, writes, reads, root, sums)
                lines = [f"{call}: {name} {value}" for name, value in facts.items()]
            except Exception as error:  # whatever it is, this rank must not raise it alone
                problem = f"{call}: {error}"
            if _compared.get():
                check_everywhere(problem, lines, "the ranks disagree", values["group"])
            elif problem is not None:
                raise ValueError(problem)
            with torch.no_grad(), _contiguous(values, writes, reads) as arguments, scratch_memory():
                result = function(**arguments)
            return None if result is None else values[writes]

        return checked

    return decorate


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, this thread's calls don't compare what the ranks ask for, which saves one small all-reduce per call.

    For a loop that is known to be right; every rank must enter and leave it. As with torch's own collectives, a rank
    whose argument is wrong raises alone, and ranks that ask for different things wait for each other until the group's
    timeout, or are ended by gloo.
    """
    before = _compared.set(False)
    try:
        yield
    finally:
        _compared.reset(before)


def member_group(group: Group) -> dist.ProcessGroup:
    """The group itself, that of a mesh, or for None the default group. Raises as `process_group` does."""
    return process_group(group) or dist.group.WORLD


def _facts(values: Mapping[str, Any], writes: str, reads: str | None, root: str | None, sums: bool) -> dict[str, Any]:
    """Return what has to be the same on every rank. Raises ValueError if the call can't be made."""
    members = dist.get_process_group_ranks(values["group"])
    if root and values[root] not in members:
        raise ValueError(f"{root}={values[root]} is not in the group, whose ranks (global ones) are {members}")
    tensors = {}
    for name in filter(None, (writes, reads)):
        value = values[name]
        if not name.endswith("_list"):
            tensors[name] = value
        elif root and dist.get_rank() != values[root]:
            if value is not None:
                raise ValueError(f"{name} must be None where the rank is not {root}")
        elif not isinstance(value, (list, tuple)) or len(value) != len(members):
            raise ValueError(f"{name} must be a list of {len(members)} tensors, one for each rank")
        else:
            tensors |= {f"{name}[{i}]": tensor for i, tensor in enumerate(value)}
    first_name, first = next(iter(tensors.items()))
    looks: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{name} must be a dense torch.Tensor with data, not {type(tensor).__name__}")
        if name.startswith(writes) and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad: call under torch.no_grad(), or pass {name}.detach()")
        here, looks = _looks(tensor), looks or _looks(tensor)
        if here != looks:
            what = next(each for each in looks if here[each] != looks[each])
            raise ValueError(f"{name} has {what} {here[what]}, but {first_name} has {looks[what]}")
    if sums and first.dtype is torch.bool:
        raise ValueError("a sum of bool is not a bool: pass .int(), or use torch.distributed with ReduceOp.BOR")
    _sent_from(first.device, values["group"])
    del looks["device"]  # ranks may use different ones
    return ({root: values[root]} if root else {}) | looks


def _looks(tensor: torch.Tensor) -> dict[str, Any]:
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return {"shape": shape, "dtype": dtype, "device": tensor.device}


@contextlib.contextmanager
def _contiguous(values: dict[str, Any], writes: str, reads: str | None) -> Iterator[dict[str, Any]]:
    """Yield the arguments with every tensor contiguous and on a device it can be sent from; then copy results back."""
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ready(tensor: torch.Tensor, is_result: bool) -> torch.Tensor:
        sent = tensor.detach().resolve_conj().resolve_neg()  # the numbers themselves, not a lazily negated view
        sent = sent.to(_sent_from(tensor.device, values["group"])).contiguous()
        if is_result and sent.data_ptr() != tensor.data_ptr():
            copies.append((tensor, sent))
        return sent

    arguments = dict(values)
    for name in filter(None, (writes, reads)):
        if isinstance(values[name], torch.Tensor):
            arguments[name] = ready(values[name], name == writes)
        elif values[name] is not None:
            arguments[name] = [ready(tensor, name == writes) for tensor in values[name]]
    yield arguments
    for tensor, sent in copies:
        tensor.copy_(sent)


def _sent_from(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where tensors of `device` are sent from: from there, or from the CPU, as gloo's send takes CPU memory only."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type == "cpu" and "cpu" in backends or backends.get(device.type) in ("nccl", "xccl"):
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    raise ValueError(f"the group ({dist.get_backend_config(group)}) can't send tensors on {device}")
