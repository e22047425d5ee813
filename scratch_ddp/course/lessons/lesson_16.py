"""Lesson 16, many machines: bytes out of hosts, a checkpoint, a run that goes on, logs that name the faulty host."""

import contextlib
import os
import tempfile
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.compare import Words
from scratch_ddp.course.exercise import Exercise, Wrong
from scratch_ddp.course.inputs.host_logs import read_logs, recordings
from scratch_ddp.instruments.traffic import traffic


def hierarchical_all_reduce(tensor, mesh):
    """Sum over all ranks of the mesh, in place, with little sent between hosts.

    mesh["local"] has the ranks of this host, mesh["host"] one rank of every host.
    Cost: reduce-scatter in the host, all-reduce between hosts, all-gather in the host,
    padded if the elements don't divide.
    """
    # Which part does a rank hold after the reduce-scatter? Who else holds that part?
    local, between = mesh["local"].get_group(), mesh["host"].get_group()
    n, size = dist.get_world_size(local), tensor.numel()
    parts = tensor.new_zeros(n, -(-size // n))
    parts.view(-1)[:size] = tensor.flatten()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter(mine, list(parts), group=local)
    dist.all_reduce(mine, group=between)
    dist.all_gather(list(parts), mine, group=local)
    tensor.copy_(parts.view(-1)[:size].view(tensor.shape))


def _on_hosts(at):
    several = 2 if at.n % 2 == 0 else at.n
    for hosts, shape in ((several, (2, 8)), (several, (7, 11)), (1, (1,))):
        local = at.n // hosts
        tensor = torch.arange(prod(shape), dtype=torch.float64).view(shape) + 100 * at.rank + 2**-30
        yield f"{hosts} × {local} ranks, shape {shape}", (tensor, at.mesh(host=hosts, local=local))


def _over_hosts(answer, tensor, mesh):
    """The sum, and which ranks each collective goes through."""
    with traffic() as counted:
        answer(tensor, mesh)
    yield "value", "`tensor`", tensor
    names = {tuple(dist.get_process_group_ranks(mesh[dim].get_group())): f'mesh["{dim}"]' for dim in ("local", "host")}
    groups = [call.members for event, call in counted.events if event == "start" and len(call.members) > 1]
    yield "group", "the group of each collective", Words(", ".join(names.get(each, "all ranks") for each in groups))


def bytes_out_of_hosts(ring, host_of, size):
    """Return {host: bytes that its ranks send to other hosts}, for every host, as ints.

    An all-reduce of `size` bytes on a ring: each rank in the list `ring` sends to the
    next one, the last to the first. host_of: {rank: host}, also of other ranks.
    """
    # How many bytes does one rank send? Which ranks send to another host?
    n = len(ring)
    sent = 2 * (n - 1) * size // n
    out = dict.fromkeys(host_of.values(), 0)
    for rank, successor in zip(ring, ring[1:] + ring[:1], strict=True):
        if host_of[rank] != host_of[successor]:
            out[host_of[rank]] += sent
    return out


def save_and_load(path):
    """Return two functions: save(model, optimizer, step) and load(model, optimizer).

    load restores what was saved last in the file `path`, and returns its step; 0 if
    there is nothing. If a save is interrupted, load finds the one before it.
    """
    # What is in the file, and under which name, while it is being written?
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


def _trainings(at):
    models = [nn.Linear(2, 2) for _ in range(4)]
    yield "a run that is saved twice", [(model, torch.optim.Adam(model.parameters(), lr=0.1)) for model in models]


def _as_training(answer, fresh, first, resumed, last):
    """Nothing saved yet; a save; a save that is interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        save, load = answer(f"{folder}/run.pt")
        yield "value", "what load returns before the first save", load(*fresh)
        _train(*first)
        save(*first, 3)
        yield "value", "what load returns after save(…, 3)", load(*resumed)
        _train(*resumed)
        yield "value", "the loaded model after a step with the loaded optimizer", resumed[0]
        first[1].param_groups[0]["note"] = (each for each in ())  # can't be pickled: whoever writes it is interrupted
        with contextlib.suppress(TypeError):
            save(*first, 4)
        try:
            found = load(*last)
        except Exception as error:
            words = f"after a save that was interrupted, load raises {type(error).__name__}"
            raise Wrong("value", f"{words}: there should still be the save before it") from error
        yield "value", "what load returns after save(…, 3) and a save that was interrupted", found


def _train(model, optimizer):
    model(torch.tensor([1.0, 2.0])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


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
    batch = saved["ranks"] * saved["per_rank"]
    steps_per_epoch = -(-saved["items"] // batch)
    mine = []
    for step in range(saved["done"], saved["done"] + steps):
        epoch, number = divmod(step, steps_per_epoch)
        items = order(epoch)[number * batch : (number + 1) * batch]
        mine.append(items[rank::n])
    return mine


def _on_n_ranks(answer, saved, n, steps):
    """Which step's items all ranks get together; then how they share them."""
    everyone = [answer(dict(saved), rank, n, steps) for rank in range(n)]
    run = resume(saved | {"done": 0}, 0, 1, saved["done"] + steps + 5)
    known = {tuple(sorted(items)): f"the run's step {number}" for number, items in enumerate(run)}
    larger = sorted(resume(saved | {"ranks": n}, 0, 1, 1)[0])
    known = {tuple(larger): f"one of n × per_rank = {len(larger)} items, not of ranks × per_rank"} | known
    for step, lists in enumerate(zip(*everyone, strict=True)):
        items = sorted(sum(lists, []))
        name = known.get(tuple(items), f"{len(items)} items that no step of the run has")
        yield "value", f"your step {saved['done'] + step}", Words(name)
    for rank, lists in enumerate(everyone):
        yield "value", f"the part of rank {rank} of {n}", Words(lists)


def saving_interval(save, restart, days, hosts):
    """Return the seconds of work between two saves with which a job loses least time.

    A save takes `save` seconds, a restart `restart`. A host fails once in `days` days
    on average, and then the whole job has to restart. 10 % off is close enough.
    """
    # What does a shorter interval cost, and what a longer one? And the restart?
    between_failures = days * 24 * 3600 / hosts
    return sqrt(2 * save * between_failures)


def faulty_host(logs):
    """Return (host, cause): which host must be repaired, and why. logs: {host: log}.

    "interface": its ranks are told to use an interface that it does not have.
    "name": its name leads to 127.0.1.1; that matters only on the endpoint's host.
    "version": it has another version of a package than the notebook.
    """
    # Which line names a cause? Which host only waited for the other?
    for host, log in logs.items():
        own_address = log.split("hostname -I")[1].split()[0]
        if "Unable to find address for" in log:
            return host, "interface"
        if "did not let this host in" in log:
            return host, "version"
        if f"trying to connect to ({own_address}," in log:
            return host, "name"


_TWO, _UNEVEN = dict(enumerate("aabba")), dict(enumerate("aaaabbc"))  # the hosts of ranks
# Hosts in turn; one of them alone; a size that a float can't hold. In the first two not all ranks are in the ring.
_RINGS = (([0, 1, 2, 3], _TWO, 40), ([3, 2], _TWO, 6), ([6, 0, 4, 1, 2, 5, 3], _UNEVEN, 7 * (10**17 + 1)))
_SAVED = {"seed": 7, "ranks": 4, "per_rank": 3}
_RUNS = {  # as many ranks as before, then others; over the end of an epoch, with and without a smaller step
    f"{items} items, {done} steps done on 4 ranks, now {n}": (_SAVED | {"items": items, "done": done}, n, steps)
    for items, done, n, steps in ((48, 1, 4, 2), (48, 1, 2, 3), (48, 3, 4, 3), (50, 3, 4, 3), (50, 14, 3, 8))
}
_JOBS = ((60, 0, 1, 1), (60, 0, 1, 24), (60, 1800, 1, 24), (30, 600, 1000, 16_384))  # save, restart, days, hosts
EXERCISES = (
    Exercise(hierarchical_all_reduce, _on_hosts, _over_hosts),
    Exercise(bytes_out_of_hosts, _RINGS),
    Exercise(save_and_load, _trainings, _as_training, given="import os"),
    Exercise(resume, _RUNS, _on_n_ranks),
    Exercise(saving_interval, _JOBS, close=0.1, given="from math import sqrt"),
    Exercise(faulty_host, {f"recording {each}": (read_logs(each),) for each in recordings()}),
)
