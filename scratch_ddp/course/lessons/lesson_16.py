"""Lesson 16, many machines: bytes out of hosts, a checkpoint, a run that goes on, logs that name the faulty host."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from math import prod, sqrt
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.arena import At
from scratch_ddp.course.compare import Words, shown
from scratch_ddp.course.exercise import Exercise, Seen, Wrong
from scratch_ddp.course.inputs.host_logs import read_logs, recordings
from scratch_ddp.instruments.traffic import traffic


def hierarchical_all_reduce(tensor, mesh):
    """Sum over all ranks of the mesh, in place, with little sent between hosts.

    mesh["local"] has the ranks of this host, mesh["host"] one rank of every host.
    Cost: reduce-scatter in the host, all-reduce between hosts, all-gather in the host,
    padded if the elements don't divide.
    """
    # Which part does a rank hold after the reduce-scatter? Who else holds that part?
    # answer: begin
    local, between = mesh["local"].get_group(), mesh["host"].get_group()
    n, size = dist.get_world_size(local), tensor.numel()
    parts = tensor.new_zeros(n, -(-size // n))
    parts.view(-1)[:size] = tensor.flatten()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, list(parts), group=local)
    dist.all_reduce(mine, group=between)
    dist.all_gather(list(parts), mine, group=local)
    tensor.copy_(parts.view(-1)[:size].view(tensor.shape))
    # answer: end


def bytes_out_of_hosts(ring, host_of, size):
    """Return {host: bytes that its ranks send to other hosts}, for every host, as ints.

    An all-reduce of `size` bytes on a ring: each rank in the list `ring` sends to the
    next one, the last to the first. host_of: {rank: host}, also of other ranks.
    """
    # How many bytes does one rank send? Which ranks send to another host?
    # answer: begin
    n = len(ring)
    sent = 2 * (n - 1) * size // n
    out = dict.fromkeys(host_of.values(), 0)
    for i, rank in enumerate(ring):
        successor = ring[(i + 1) % n]
        if host_of[rank] != host_of[successor]:
            out[host_of[rank]] += sent
    return out
    # answer: end


def save_and_load(path):
    """Return two functions: save(model, optimizer, step) and load(model, optimizer).

    load restores what was saved last in the file `path`, and returns its step; 0 if
    there is nothing. If a save is interrupted, load finds the one before it.
    """
    # What is in the file, and under which name, while it is being written?
    # answer: begin
    partial = f"{path}.partial"

    def save(model, optimizer, step):
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
        os.replace(partial, path)  # at once: there is no moment with half a file

    def load(model, optimizer):
        if not os.path.exists(path):
            return 0
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]

    return save, load
    # answer: end


def resume(saved, rank, n, steps):
    """Return this rank's items in the next `steps` steps, a list for each step.

    The run began on saved["ranks"] ranks, with saved["per_rank"] items each in a step,
    and has done saved["done"] steps. Now there are n ranks, but every step still has
    the items that it would have had; an epoch's last step may have fewer.
    Rank r takes a step's items at r, r + n, r + 2n, …
    """

    def order(epoch):
        generator = torch.Generator().manual_seed(saved["seed"] + epoch)
        return torch.randperm(saved["items"], generator=generator).tolist()

    # How many items has a step? In which epoch is the first one, and where?
    # answer: begin
    batch = saved["ranks"] * saved["per_rank"]
    steps_per_epoch = -(-saved["items"] // batch)
    mine = []
    for step in range(saved["done"], saved["done"] + steps):
        epoch, number = divmod(step, steps_per_epoch)
        items = order(epoch)[number * batch : (number + 1) * batch]
        mine.append(items[rank::n])
    return mine
    # answer: end


def saving_interval(save, restart, days, hosts):
    """Return the seconds of work between two saves with which a job loses least time.

    A save takes `save` seconds, a restart `restart`. A host fails once in `days` days
    on average, and then the whole job has to restart. 10 % off is close enough.
    """
    # What does a shorter interval cost, and what a longer one? And the restart?
    # answer: begin
    between_failures = days * 24 * 3600 / hosts
    return sqrt(2 * save * between_failures)
    # answer: end


def faulty_host(logs):
    """Return (host, cause): which host must be repaired, and why. logs: {host: log}.

    "interface": its ranks are told to use an interface that it does not have.
    "name": its name leads to 127.0.1.1; that matters only on the endpoint's host.
    "version": it has another version of a package than the notebook.
    """
    # Which line names a cause? Which host only waited for the other?
    # answer: begin
    for host, log in logs.items():
        own_address = log.split("hostname -I")[1].split()[0]
        if "Unable to find address for" in log:
            return host, "interface"
        if "did not let this host in" in log:
            return host, "version"
        if f"trying to connect to ({own_address}," in log:
            return host, "name"
    # answer: end


def on_hosts(at: At) -> Iterator[tuple[str, tuple]]:
    """Every split of the ranks into hosts, with parts that are equal, padded, and empty. float32 would round."""
    for hosts in [*(hosts for hosts in range(2, at.n) if at.n % hosts == 0), at.n, 1]:
        local = at.n // hosts
        mesh = DeviceMesh("cpu", torch.arange(at.n).view(hosts, local), mesh_dim_names=("host", "local"))
        for shape in ((2, 4 * local), (3, 5), (1,)):
            tensor = torch.arange(prod(shape), dtype=torch.float64).view(shape) + 100 * at.rank + 2**-30
            yield f"{hosts} × {local} ranks, shape {shape}", (tensor, mesh)


def over_hosts(answer: Callable, tensor: torch.Tensor, mesh: DeviceMesh) -> Iterator[Seen]:
    """The sum, and which ranks each collective goes through."""
    with traffic() as counted:
        answer(tensor, mesh)
    yield "value", "`tensor`", tensor
    names = {tuple(dist.get_process_group_ranks(mesh[dim].get_group())): dim for dim in ("local", "host")}
    groups = [call.members for event, call in counted.events if event == "start"]
    order = ", ".join(f'mesh["{names[each]}"]' if each in names else "all ranks" for each in groups if len(each) > 1)
    yield "group", "the group of each collective", Words(order or "none")


def rings(at: At) -> Iterator[tuple[str, tuple]]:
    """Two hosts in blocks and in turn; then hosts of unequal size, ranks that take no part, a single rank."""
    two = {rank: "ab"[rank // 2] for rank in range(4)}
    uneven = {rank: "aaaabbc"[rank] for rank in range(7)}
    for case, (ring, host_of, size) in {
        "4 ranks in blocks": ([0, 1, 2, 3], two, 40),
        "4 ranks, hosts in turn": ([0, 2, 1, 3], two, 40),
        "4 ranks, the first and the last on one host": ([1, 2, 3, 0], two, 40),
        "2 ranks of 4, on two hosts": ([0, 2], two, 6),
        "2 ranks of 4, on one host": ([3, 2], two, 6),
        "a single rank": ([1], two, 12),
        "7 ranks on hosts of 4, 2 and 1": ([6, 0, 4, 1, 2, 5, 3], uneven, 7 * (10**17 + 1)),
    }.items():
        yield f"{case}: ring {ring}", (ring, dict(host_of), size)


def one_run(at: At) -> Iterator[tuple[str, tuple]]:
    yield "a run that saves three times", ()


def as_training(answer: Callable) -> Iterator[Seen]:
    """Nothing saved yet; a save; a save that is interrupted; one more."""
    with tempfile.TemporaryDirectory() as folder:
        save, load = answer(str(Path(folder) / "run.pt"))
        yield "value", "what load returns before the first save", load(*_new(seed=1))
        run = _new(seed=0)
        for _ in range(3):
            _train(*run)
        save(*run, 3)
        resumed = _new(seed=1)
        yield "value", "what load returns after save(…, 3)", load(*resumed)
        yield "value", "the loaded model", resumed[0]
        _train(*resumed)
        yield "value", "the loaded model after a step with the loaded optimizer", resumed[0]
        run[1].param_groups[0]["note"] = _Ends()
        with contextlib.suppress(InterruptedError):
            save(*run, 4)
        del run[1].param_groups[0]["note"]
        resumed = _new(seed=1)
        try:
            yield "value", "what load returns after save(…, 3) and a save that was interrupted", load(*resumed)
        except Exception as error:
            words = f"after a save that was interrupted, load raises {type(error).__name__}"
            raise Wrong("value", f"{words}: there should still be the save before it") from error
        yield "value", "the model that is loaded then", resumed[0]
        save(*run, 5)
        yield "value", "what load returns after save(…, 5)", load(*resumed)


class _Ends:
    """Whoever writes it into a file is interrupted."""

    def __reduce__(self) -> str:
        raise InterruptedError


def _new(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.tensor([1.0, 2.0])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def runs(at: At) -> Iterator[tuple[str, tuple]]:
    """As many ranks as before, then others; then over the end of an epoch, with and without a smaller step."""
    for items, ranks, per_rank, done, n, steps in (
        (48, 4, 3, 1, 4, 2),
        (48, 4, 3, 1, 2, 3),
        (48, 4, 3, 1, 6, 3),
        (48, 4, 3, 3, 4, 3),
        (50, 4, 3, 3, 4, 3),
        (50, 4, 3, 14, 3, 8),
        (9, 2, 2, 1, 4, 3),
    ):
        saved = {"seed": 7, "items": items, "ranks": ranks, "per_rank": per_rank, "done": done}
        yield f"{n} ranks, {steps} steps, saved={saved}", (saved, n, steps)


def on_n_ranks(answer: Callable, saved: dict[str, int], n: int, steps: int) -> Iterator[Seen]:
    """Which step's items all ranks get together; then how they share them."""
    given = dict(saved)
    everyone = [answer(given if rank == n - 1 else dict(saved), rank, n, steps) for rank in range(n)]
    for rank, lists in enumerate(everyone):
        if not isinstance(lists, list) or len(lists) != steps or not all(isinstance(each, list) for each in lists):
            raise Wrong("value", f"rank {rank} gets {shown(lists)}, should get {steps} lists")
    run = resume(saved | {"done": 0}, 0, 1, saved["done"] + steps + 5)
    known = {tuple(sorted(items)): f"the run's step {number}" for number, items in enumerate(run)}
    larger = sorted(resume(saved | {"ranks": n}, 0, 1, 1)[0])
    for step in range(steps):
        items = sorted(item for lists in everyone for item in lists[step])
        if items == larger and tuple(items) not in known:
            raise Wrong("value", f"your step has n × per_rank = {len(items)} items, should have ranks × per_rank")
        name = known.get(tuple(items), f"{len(items)} items that no step of the run has")
        yield "value", f"your step {saved['done'] + step}", Words(name)
    for rank, lists in enumerate(everyone):
        yield "value", f"the part of rank {rank} of {n}", Words(lists)
    yield "untouched", "`saved`", given


def jobs(at: At) -> Iterator[tuple[str, tuple]]:
    """One host, then many; restarts that take no time, or long."""
    for save, restart, days, hosts in (
        (2, 0, 1, 1),
        (60, 0, 1, 1),
        (60, 0, 1, 24),
        (60, 1800, 1, 24),
        (30, 600, 1000, 16_384),
    ):
        yield f"save={save}, restart={restart}, days={days}, hosts={hosts:,}", (save, restart, days, hosts)


def logs_of_jobs(at: At) -> Iterator[tuple[str, tuple]]:
    """Every recording, with other names for hosts and cards, and with either host first."""
    for number, recording in enumerate(recordings()):
        logs = read_logs(recording, names=(f"gpu{number}", f"node{number}"))
        for order in (list(logs), list(logs)[::-1]):
            given = {host: logs[host].replace("ens5", f"enp{number}s0") for host in order}
            yield f"recording {recording}, hosts {' and '.join(order)}", (given,)


EXERCISES = (
    Exercise(hierarchical_all_reduce, on_hosts, over_hosts),
    Exercise(bytes_out_of_hosts, rings),
    Exercise(save_and_load, one_run, as_training, given="import os"),
    Exercise(resume, runs, on_n_ranks),
    Exercise(saving_interval, jobs, close=0.1, given="from math import sqrt"),
    Exercise(faulty_host, logs_of_jobs),
)
