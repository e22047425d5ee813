"""What a class of the learner's own is judged by, on ranks: one function for each criterion.

Every rank calls it with the class, and with a process group of our own: a call too many of the class would meet one of
ours. It returns what is wrong on this rank, or "". Budgets are those of `notebooks/capstone.md`.
"""

import contextlib
import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.capstone.models import (
    Heads,
    Tied,
    Tower,
    anywhere,
    batch,
    difference,
    gradients,
    loss_of,
    mean_of_ranks,
    take_step,
)
from scratch_ddp.instruments.memory import memory_use
from scratch_ddp.instruments.traffic import Counted, ring_bytes, traffic

STEPS = 5
MIB, SMALL = 2**20, 1024
Wrap = Callable[[nn.Module], nn.Module]
Group = dist.ProcessGroup


def start(wrap: Wrap, group: Group) -> str:
    """All ranks begin with rank 0's parameters and buffers."""
    torch.manual_seed(dist.get_rank())
    model = Tied()
    rank0s = {name: value.clone() for name, value in model.state_dict().items()}
    for value in rank0s.values():
        dist.broadcast(value, src=0, group=group)
    wrap(model)
    different = [name for name, value in model.state_dict().items() if not torch.equal(value, rank0s[name])]
    return f"{different[0]} is not rank 0's after MyDDP(model)" if different else ""


def value(wrap: Wrap, group: Group) -> str:
    """In float64, steps of SGD lead to the parameters of one process that sees all rows."""
    torch.manual_seed(0)
    alone = Tied()
    model = wrap(copy.deepcopy(alone))
    for step in range(STEPS):
        loss_of(alone(batch(step, 6, everyones=True))).backward()
        _backward(model, batch(step, 6))
        complaint = difference(gradients(model.module), gradients(alone))
        if anywhere(complaint, group):
            return complaint and f"step {step + 1}: {complaint}"
        for each in (alone, model):
            take_step(each)
    far = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    return f"after {STEPS} steps a parameter differs from one process's by {far:.1g}" if far > 1e-9 else ""


def replicas(wrap: Wrap, group: Group) -> str:
    """In float32, the replicas are the same bits after each step."""
    torch.manual_seed(0)
    model = wrap(Tied(torch.float32))
    for step in range(STEPS):
        _backward(model, batch(step, 6, torch.float32))
        take_step(model)
        different = [name for name, each in model.module.named_parameters() if not _is_rank0s(each.detach(), group)]
        if anywhere("".join(different), group):
            return f"step {step + 1}: {different[0]} is not rank 0's, bit for bit" if different else ""
    return ""


def calls(wrap: Wrap, group: Group) -> str:
    """A step makes one call for each MiB of gradients at most, and two more."""
    counted, size = _counted_step(wrap)
    budget = math.ceil(size / MIB) + 2
    if sum(counted.calls.values()) <= budget:
        return ""
    return f"a step with {size / MIB:.1f} MiB of gradients makes {_names(counted)}; budget {budget}"


def bytes_sent(wrap: Wrap, group: Group) -> str:
    """A step sends what a ring sends for 4 bytes a parameter, and 1 KiB."""
    counted, size = _counted_step(wrap)
    return _too_many_bytes(counted, size)


def memory(wrap: Wrap, group: Group) -> str:
    """At no time is more than one further copy of the gradients held."""
    torch.manual_seed(0)
    peaks = []
    for make in (lambda model: model, wrap):
        model = Tower()
        size = _size(model)
        with memory_use() as used:
            model = make(model)
            for step in range(2):
                _backward(model, batch(step, 160, torch.float32))
                model.zero_grad()
        peaks.append(used.peak_bytes)
    copies = (peaks[1] - peaks[0]) / size
    return f"{copies:.2f} further copies of the gradients are held at the peak; budget 1" if copies > 1.05 else ""


def accumulation(wrap: Wrap, group: Group) -> str:
    """Inside `no_sync()` nothing is sent, the last micro-batch sends for all; it ends after an exception, and nests."""
    torch.manual_seed(0)
    alone = Tied()
    model = wrap(copy.deepcopy(alone))
    for round_ in range(2):
        for micro in range(3):
            loss_of(alone(batch(micro, 6))).backward()
            with model.no_sync() if micro < 2 else contextlib.nullcontext(), traffic() as counted:
                if micro == 0:
                    with model.no_sync():
                        pass
                _backward(model, batch(micro, 6))
            if micro < 2 and counted.calls:
                again = " after an inner no_sync() has ended" if micro == 0 else ""
                return f"inside no_sync(){again}, a micro-batch sends: {_names(counted)}"
        complaint = difference(gradients(model.module), mean_of_ranks(alone, group))
        if anywhere(complaint, group):
            where = " after an exception inside no_sync()" if round_ else ""
            return complaint and f"after 2 micro-batches inside no_sync() and one outside{where}, {complaint}"
        for each in (alone, model):
            each.zero_grad()
        with contextlib.suppress(KeyError), model.no_sync():
            raise KeyError
    return ""


def unused(wrap: Wrap, group: Group) -> str:
    """A parameter that a rank has not used counts as zero there; one that no rank has used keeps `.grad` None."""
    torch.manual_seed(0)
    alone = Heads()
    model = wrap(copy.deepcopy(alone))
    for step, heads in enumerate(((0, 1, 0), (0, 0, 0))):
        head = heads[dist.get_rank() % len(heads)]
        loss_of(alone(batch(step, 6), head)).backward()
        loss_of(model(batch(step, 6), head)).backward()
        model.sync_gradients()
        complaint = difference(gradients(model.module), mean_of_ranks(alone, group))
        if anywhere(complaint, group):
            return complaint and f"step {step + 1}, in which the ranks use heads {heads}: {complaint}"
        for each in (alone, model):
            each.zero_grad()
    return ""


def frozen(wrap: Wrap, group: Group) -> str:
    """Frozen parameters stay as they are, without a gradient, and cost nothing."""
    torch.manual_seed(0)
    model = Tower()
    for parameter in model.layers[:20].parameters():
        parameter.requires_grad = False
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    model = wrap(model)
    with traffic() as counted:
        _backward(model, batch(0, 160, torch.float32))
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad != (parameter.grad is not None):
            return f"{name} has {'no' if parameter.grad is None else 'a'} gradient"
    return _too_many_bytes(counted, trained)


def _is_rank0s(mine: torch.Tensor, group: Group) -> bool:
    rank0s = mine.clone()
    dist.broadcast(rank0s, src=0, group=group)
    return torch.equal(rank0s, mine)


def _backward(model: nn.Module, rows: torch.Tensor) -> None:
    loss_of(model(rows)).backward()
    getattr(model, "sync_gradients", lambda: None)()  # a plain model has none


def _counted_step(wrap: Wrap) -> tuple[Counted, int]:
    """What this rank sends in a second step, and the bytes of the gradients."""
    torch.manual_seed(0)
    model = wrap(Tower())
    for step in range(2):
        with traffic() as counted:
            _backward(model, batch(step, 160, torch.float32))
        model.zero_grad()
    return counted, _size(model)


def _size(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _too_many_bytes(counted: Counted, size: int) -> str:
    budget = ring_bytes("all_reduce", size + SMALL, dist.get_world_size(), dist.get_rank(), None)
    if counted.wire_bytes <= budget:
        return ""
    return f"a step with {size:,} bytes of gradients sends {counted.wire_bytes:,} bytes; budget {budget:,}"


def _names(counted: Counted) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counted.calls.items())


ON_RANKS: dict[str, tuple[str, Callable[[Wrap, Group], str]]] = {  # name: (what holds, function)
    "start": ("all ranks begin with rank 0's parameters and buffers", start),
    "value": ("the gradients are the mean, and the parameters those of one process, in float64", value),
    "replicas": ("the replicas are equal, bit for bit, after each step", replicas),
    "calls": ("one call a MiB of gradients at most, and two more", calls),
    "bytes": ("no more than a ring sends for 4 bytes a parameter, and 1 KiB", bytes_sent),
    "memory": ("no more than one further copy of the gradients", memory),
    "accumulation": ("nothing is sent inside no_sync(), and once after it", accumulation),
    "unused": ("parameters that a rank, or no rank, has used", unused),
    "frozen": ("frozen parameters have no gradient and are not sent", frozen),
}
