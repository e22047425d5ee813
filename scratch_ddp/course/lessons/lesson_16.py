"""Lesson 16, many machines: bytes that leave a host, a resume, the interval between saves, and two logs."""

import itertools
import math
from collections.abc import Iterator
from math import sqrt

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import INT16, parts_of_every_kind, parts_of_further_dtypes, total_of
from scratch_ddp.course.inputs.host_logs import fault_in, read_logs, recordings
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.calls import Call


def hierarchical_all_reduce(tensor, mesh):
    """Leave in `tensor` the sum over all ranks of the mesh, the same bits on every rank.

    mesh: a DeviceMesh. mesh["local"] holds the ranks of this rank's host, mesh["host"] the ranks
    with its place on every host; both can be a single rank. tensor: any shape and strides, empty
    too, and any dtype that gloo adds; shape and dtype are the same on every rank.
    Cost: one reduce-scatter and one all-gather in the host, one all-reduce between the hosts. Each
    rank's part is the tensor's elements divided by the ranks of a host, rounded up. So each of
    H hosts sends 2(H-1)/H of the tensor's bytes, with its padding, to other hosts.
    """
    # Which part of the sum does a rank hold after the reduce-scatter? Who else holds that part?
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
    """Return a dict: for each host, the bytes that its ranks send to other hosts, an exact int.

    A ring all-reduce of `size` bytes. ring: a list of the ranks in it, each once; each sends to the
    next in the list, the last to the first. host_of: a dict from rank to the host's name; it can hold
    ranks that are not in the ring. Every host of host_of is in the result. The number of ranks in
    the ring divides `size`, which may be large. A single rank sends nothing.
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


def resume(saved, rank, n, steps):
    """Return the items of this rank in the next `steps` steps of a resumed run: a list of lists.

    Together, the n ranks have in each step the items that they would have had without the
    interruption: of an epoch no item is seen twice and none left out, however often n changes.
    saved: a dict. "seed"; "items": how many there are; "ranks": how many the run began with;
    "per_rank": items of each of those ranks in a step; "done": the steps of the run up to the save,
    in all epochs. An epoch ends with a smaller step if the items don't divide. Of a step's items,
    in order, rank r of n takes those at r, r + n, r + 2n, …: at the end it may have none, [].
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
    """Return the seconds of work between two saves with which a job loses the least time.

    save, restart: seconds that a save and a restart take; meanwhile nobody works. A host fails once
    in so many `days` on average, at any moment equally likely, and one failed host stops the job.
    What was done since the last save is lost. The save takes at most a 50th of the time between
    two failures of the job. The result may be 10 % off the best.
    """
    # What does a shorter interval cost, and what a longer one? What does a restart change in that?
    # answer: begin
    between_failures = days * 24 * 3600 / hosts
    return sqrt(2 * save * between_failures)
    # answer: end


def faulty_host(logs):
    """Return (host, cause): which of two hosts is to be repaired, and what is wrong there.

    logs: a dict from each host's name to what was printed there. Each log begins with the host's
    name, its address and what its own name leads to. On many systems that is 127.0.1.1, which does
    no harm unless the rendezvous is to be on that host. Names are drawn, in either order. cause is
    "interface": the ranks there are to use a network card that the host does not have
    "name": its own name leads to 127.0.1.1, so it does not see that the rendezvous is to be there
    "version": it has another version of a package than the notebook
    One host has one of these faults, and nothing else is wrong.
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


def examine_hierarchical_all_reduce(trial: Trial) -> None:
    """V, A, C, and the right group, for every split of the ranks into equal hosts, in blocks and alternating."""
    n = trial.size
    ranks, layouts = torch.arange(n), {}
    for hosts in (number for number in range(2, n) if n % number == 0):
        layouts[f"{hosts} × {n // hosts} ranks in blocks"] = ranks.view(hosts, -1)
        layouts[f"{hosts} × {n // hosts} ranks alternating"] = ranks.view(-1, hosts).T
    layouts |= {f"1 × {n} ranks": ranks.view(1, n), f"{n} × 1 ranks": ranks.view(n, 1)}
    for number, (where, members) in enumerate(layouts.items()):
        _examine_mesh(trial, where, members, every_kind=number == 0 and trial.on_all_ranks)


def _examine_mesh(trial: Trial, where: str, members: torch.Tensor, every_kind: bool) -> None:
    """members: (hosts, ranks of a host)."""
    hosts, local = members.shape
    mesh = DeviceMesh(trial.device.type, members, mesh_dim_names=("host", "local"))
    everyones = {f"{where}, {case}": parts for case, parts in _parts(trial, every_kind).items()}
    mine = {case: parts[trial.rank].to(trial.device, copy=True) for case, parts in everyones.items()}
    spread = {case: tensor.new_zeros(*tensor.shape, 2) for case, tensor in mine.items() if "every second" in case}
    for case, wide in spread.items():
        wide[..., 0], wide[..., 1] = mine[case], 7
        mine[case] = wide[..., 0]
    gaps = {f"what lies beside the tensor ({case})": wide[..., 1] for case, wide in spread.items()}
    cases = {case: (tensor, mesh) for case, tensor in mine.items()}
    for case, _ in zip(cases, trial.call_each(cases, changes=list(mine.values())), strict=True):
        trial.value(mine[case], total_of(everyones[case]).to(trial.device), "tensor")
        trial.agreement(mine[case])
    for case, gap in gaps.items():
        trial.untouched(gap, torch.full_like(gap, 7), case)
    inside, between = (tuple(dist.get_process_group_ranks(mesh[name].get_group())) for name in ("local", "host"))
    for call in trial.calls:
        trial.criterion("group", _wrong_group(call, inside, between), f"{where}:")
    parts = [-(-tensor.numel() // local) * tensor.element_size() for tensor in mine.values()]
    wire = sum(2 * (local - 1) * part + ring_bytes("all_reduce", part, hosts, 0) for part in parts)
    each = {"reduce_scatter": len(mine), "all_reduce": len(mine), "all_gather": len(mine)}
    trial.cost(calls=each, max_wire_bytes=wire, note=lambda _: f"({where}, {len(mine)} tensors together)")


def _wrong_group(call: Call, inside: tuple[int, ...], between: tuple[int, ...]) -> str:
    """That a call is made on other ranks than it should be; "" if it is not."""
    right = between if call.name == "all_reduce" else inside
    if call.members == right:
        return ""
    return f"{call.name} goes through ranks {list(call.members)}, should go through ranks {list(right)}"


def _parts(trial: Trial, every_kind: bool) -> dict[str, list[torch.Tensor]]:
    """By case: each rank's tensor. Their sum is the same in every order."""
    n = trial.size
    drawn = int(torch.randint(2 * n, 200, (1,), generator=trial.generator()))
    shapes = {"one element": (1,), f"{drawn} elements, seed {trial.seed}": (drawn,)}
    if every_kind:
        shapes |= {"3 × 5, every second element": (3, 5), f"{n - 1} × 0": (n - 1, 0), f"{n + 1} elements": (n + 1,)}
    parts = {
        case: [torch.arange(float(math.prod(shape))).view(shape) * 3 - 5 * rank + 1 for rank in range(n)]
        for case, shape in shapes.items()
    }
    parts["5 × 3, transposed"] = [torch.arange(15.0).view(3, 5).T * (rank + 1) for rank in range(n)]
    if every_kind:
        parts |= parts_of_every_kind(n) | parts_of_further_dtypes(n)
        del parts[INT16]
    return parts


def examine_bytes_out_of_hosts(trial: Trial) -> None:
    """V for rings in any order, on one host or many, of some of the ranks, with large sizes; drawn ones."""
    two = {rank: "ab"[rank // 2] for rank in range(4)}
    uneven = {rank: "aaaabbc"[rank] for rank in range(7)}
    cases = {
        "4 ranks in blocks": ([0, 1, 2, 3], two, 4 * 10),
        "4 ranks, hosts alternate": ([0, 2, 1, 3], two, 4 * 10),
        "2 ranks on 2 hosts": ([0, 2], two, 2 * 3),
        "2 ranks of one host": ([3, 2], two, 2 * 3),
        "3 hosts of unequal size": ([6, 0, 4, 1, 2, 5, 3], uneven, 7 * 11),
        "3 hosts in blocks, a large size": ([0, 1, 2, 3, 4, 5, 6], uneven, 7 * (10**17 + 1)),
        "3 ranks of 7": ([5, 6, 1], uneven, 3 * 8),
        "a single rank": ([1], two, 12),
        "ranks far apart": ([40, 8, 3, 90], {8: "x", 3: "y", 90: "x", 40: "y"}, 4 * 5),
        "no bytes": ([0, 2, 1, 3], two, 0),
    }
    generator = trial.generator()
    for n in (6, 13):
        ring = torch.randperm(n, generator=generator).tolist()
        host_of = {rank: f"host {int(torch.randint(4, (1,), generator=generator))}" for rank in range(n + 2)}
        cases[f"{n} ranks, drawn with seed {trial.seed}"] = (ring, host_of, n * 1000)
    cases = {case: (ring, dict(host_of), size) for case, (ring, host_of, size) in cases.items()}
    expected = [_sent_by_hosts(*each) for each in cases.values()]
    for result, right in zip(trial.call_each(cases), expected, strict=True):
        trial.value(dict(result) if isinstance(result, dict) else result, right)
    trial.cost(calls={})


def _sent_by_hosts(ring: list[int], host_of: dict[int, str], size: int) -> dict[str, int]:
    """Message by message."""
    sent = dict.fromkeys(host_of.values(), 0)
    for _ in range(2 * (len(ring) - 1)):  # rounds, in each of which every rank sends one part
        for sender, receiver in zip(ring, [*ring[1:], ring[0]], strict=True):
            if host_of[sender] != host_of[receiver]:
                sent[host_of[sender]] += size // len(ring)
    return sent


def examine_resume(trial: Trial) -> None:
    """V on every rank of each new number of ranks: in an epoch, over its end, several of them; drawn runs."""
    runs = [  # items, ranks, per_rank, done, n, steps
        (48, 4, 3, 2, 4, 2),
        (48, 4, 3, 2, 2, 4),
        (48, 4, 3, 1, 3, 7),
        (48, 2, 3, 8, 4, 3),
        (50, 4, 3, 4, 4, 3),
        (50, 4, 3, 5, 2, 6),
        (50, 4, 3, 14, 5, 8),
        (37, 3, 4, 0, 1, 9),
        (7, 2, 5, 3, 8, 2),
        (20, 1, 4, 6, 2, 0),
        (9, 3, 1, 100, 2, 4),
    ]
    drawn = torch.randint(1, 7, (3, 6), generator=trial.generator()).tolist()
    runs += [(10 * items + done, ranks, per_rank, done, n, steps) for items, ranks, per_rank, done, n, steps in drawn]
    cases, expected = {}, {}
    for number, (items, ranks, per_rank, done, n, steps) in enumerate(runs):
        saved = {"seed": 3 * number, "items": items, "ranks": ranks, "per_rank": per_rank, "done": done}
        everyones = list(itertools.islice(_steps_of(saved), done, done + steps))
        note = f", drawn with seed {trial.seed}" if number >= len(runs) - len(drawn) else ""
        for rank in range(n):
            case = f"saved={saved}, rank {rank} of {n}, {steps} steps{note}"
            cases[case] = (dict(saved), rank, n, steps)
            expected[case] = [everyone[rank::n] for everyone in everyones]
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        trial.value(result, expected[case])
    trial.cost(calls={})


def _steps_of(saved: dict[str, int]) -> Iterator[list[int]]:
    """The items of each step, from the first one on."""
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(saved["seed"] + epoch)
        order = torch.randperm(saved["items"], generator=generator)
        yield from (step.tolist() for step in order.split(saved["ranks"] * saved["per_rank"]))


def examine_saving_interval(trial: Trial) -> None:
    """V within 10 %: long and short saves, few hosts and many, restarts that take long or no time; drawn ones."""
    day = 86_400
    jobs = [(2, 18, 600 / day, 1), (2, 600, 600 / day, 1), (2, 18, 1200 / day, 2), (12, 60, 600 / day, 1)]
    jobs += [(60, 300, 30, 1), (60, 300, 30, 1000), (30, 600, 1000, 16_384), (10, 0, 1, 24), (1e-3, 1.0, 1e-3, 80)]
    drawn = torch.randint(1, 100, (3, 4), generator=trial.generator()).tolist()
    jobs += [(save / 10, 5 * restart, 3 * days, hosts) for save, restart, days, hosts in drawn]
    cases = {
        f"save={save:g}, restart={restart}, days={days:.4g}, hosts={hosts:,}"
        + (f" (seed {trial.seed})" if number >= len(jobs) - len(drawn) else ""): (save, restart, days, hosts)
        for number, (save, restart, days, hosts) in enumerate(jobs)
    }
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        save, _, days, hosts = cases[case]
        trial.criterion("value", _wrong_interval(result, _best_interval(save, days * day / hosts)), "the result")
    trial.cost(calls={})


def _best_interval(save: float, mean: float) -> float:
    """Where failures come every `mean` seconds, an interval of t seconds takes mean · (exp((t + save) / mean) - 1).

    That includes what failures repeat, and each restart takes its share of it, whatever t is. Divided by t, it is least
    where (1 - t/mean) · exp((t + save) / mean) = 1.
    """
    low, high = 0.0, mean
    for _ in range(60):
        middle = (low + high) / 2
        if (1 - middle / mean) * math.exp((middle + save) / mean) > 1:
            low = middle
        else:
            high = middle
    return low


def _wrong_interval(result: object, best: float) -> str:
    if type(result) not in (int, float):
        return difference(result, best)
    return "" if 0.9 * best <= result <= 1.1 * best else f"is {result:.4g}, should be {best:.4g}, give or take 10 %"


def examine_faulty_host(trial: Trial) -> None:
    """V on every recording, with names that are drawn, long and short, and the host at fault first and last."""
    cases, expected = {}, {}
    numbers = iter(torch.randperm(900, generator=trial.generator()).tolist())
    for recording, turned in itertools.product(recordings(), (False, True)):
        names = f"gpu{next(numbers)}", f"worker-{100 + next(numbers)}"
        given = names[::-1] if turned else names
        logs = read_logs(recording, given)
        case = f"recording {recording}, names {' and '.join(given)}"
        cases[case] = ({name: logs[name] for name in names},)
        expected[case] = fault_in(recording, given)
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        trial.value(result, expected[case])
    trial.cost(calls={})


HIERARCHICAL_ALL_REDUCE = Exercise(hierarchical_all_reduce, examine_hierarchical_all_reduce)
BYTES_OUT_OF_HOSTS = Exercise(bytes_out_of_hosts, examine_bytes_out_of_hosts)
RESUME = Exercise(resume, examine_resume)
SAVING_INTERVAL = Exercise(saving_interval, examine_saving_interval, given="from math import sqrt")
FAULTY_HOST = Exercise(faulty_host, examine_faulty_host, also_named=("read_logs", "fault_in"))
EXERCISES = (HIERARCHICAL_ALL_REDUCE, BYTES_OUT_OF_HOSTS, RESUME, SAVING_INTERVAL, FAULTY_HOST)
