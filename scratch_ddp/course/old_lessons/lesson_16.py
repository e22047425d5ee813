"""Lesson 16: what leaves a host in an all-reduce, and how to keep it small."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.every_kind import total_of
from scratch_ddp.course.inputs.host_meshes import drawn_meshes, parts_on_hosts
from scratch_ddp.course.inputs.larger import Fenced
from scratch_ddp.course.inputs.mesh_in_one_process import RanksOfMesh
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.lessons.lesson_16_failures import saving_interval  # noqa: F401  copies of the lesson have it
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference, shown
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.calls import Call


def hierarchical_all_reduce(tensor, mesh):
    """Leave in `tensor` the sum over all ranks of the mesh, the same bits on every rank.

    mesh: a DeviceMesh, its two dimensions in either order. mesh["local"] holds the ranks of this
    rank's host, mesh["host"] the ranks with its place on every host; both can be a single rank.
    tensor: any shape and strides, empty too, and any dtype that gloo adds; it may be a part of a
    larger tensor. Shape and dtype are the same on every rank.
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


def examine_hierarchical_all_reduce(trial: Trial) -> None:
    """V, A, C, and the right group, for every split of the ranks into equal hosts; then meshes of 1 to 8 ranks."""
    n, device = trial.size, trial.device.type
    splits = [*(hosts for hosts in range(2, n) if n % hosts == 0), 1]
    for hosts in splits:
        ranks = torch.arange(n).view(hosts, -1)
        mesh = DeviceMesh(device, ranks, mesh_dim_names=("host", "local"))
        every_kind = hosts == splits[0] and trial.on_all_ranks
        _examine_mesh(trial, mesh, f"{hosts} × {n // hosts} ranks in blocks", every_kind)
        # With the names exchanged it is another split, on the same groups.
        turned = DeviceMesh.from_group(mesh.get_all_groups(), device, mesh=ranks, mesh_dim_names=("local", "host"))
        _examine_mesh(trial, turned, f'{n // hosts} × {hosts} ranks alternating, "local" the first dimension', False)
    trial.end_if_wrong()
    if trial.on_all_ranks:
        _examine_meshes_in_one_process(trial)


def _examine_mesh(trial: Trial, mesh: DeviceMesh, where: str, every_kind: bool) -> None:
    everyones = {
        f"{where}, {case}": parts for case, parts in parts_on_hosts(trial.size, trial.seed, every_kind).items()
    }
    fenced = {case: Fenced(parts[trial.rank].to(trial.device), case) for case, parts in everyones.items()}
    cases = {case: (each.tensor, mesh) for case, each in fenced.items()}
    inside, between = (tuple(dist.get_process_group_ranks(mesh[name].get_group())) for name in ("local", "host"))
    for case, _ in zip(cases, trial.call_each(cases, changes=[each.tensor for each in fenced.values()]), strict=True):
        fenced[case].judge(trial, total_of(everyones[case]).to(trial.device))
        for call in trial.calls:
            trial.criterion("group", _wrong_group(call, inside, between))
        trial.cost(calls=_CALLS, max_wire_bytes=_wire_bytes(everyones[case][0], len(between), len(inside)))


_CALLS = {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}


def _wire_bytes(tensor: torch.Tensor, hosts: int, local: int) -> int:
    part = -(-tensor.numel() // local) * tensor.element_size()
    return 2 * (local - 1) * part + ring_bytes("all_reduce", part, hosts, 0)


def _wrong_group(call: Call, inside: tuple[int, ...], between: tuple[int, ...]) -> str:
    """That a call is made on other ranks than it should be; "" if it is not."""
    right = between if call.name == "all_reduce" else inside
    if call.members == right:
        return ""
    return f"{call.name} goes through ranks {list(call.members)}, should go through ranks {list(right)}"


def _examine_meshes_in_one_process(trial: Trial) -> None:
    """V and C for every kind of tensor on meshes of any hosts and ranks."""
    cases = drawn_meshes(trial.seed)
    fenced: dict[str, list[Fenced]] = {}

    def arguments(case: str) -> list[tuple]:
        fenced[case] = [Fenced(part.to(trial.device), case) for part in cases[case].parts]
        mesh = RanksOfMesh(cases[case].ranks, cases[case].names)
        return [(mesh, each.tensor) for each in fenced[case]]

    def on_mesh(answer: Callable, mesh: RanksOfMesh, tensor: torch.Tensor) -> object:
        return mesh.run(answer, tensor)

    makers = {case: functools.partial(arguments, case) for case in cases}
    for case, world in tried_in_worlds(trial, makers, using=on_mesh):
        mesh = cases[case]
        for rank, each in enumerate(fenced[case]):
            each.judge(trial, total_of(mesh.parts).to(trial.device), f"{world.place} rank {rank}'s ")
        wire = _wire_bytes(mesh.parts[0], mesh.hosts, mesh.ranks.numel() // mesh.hosts)
        trial.criterion("cost", world.over_budget(_CALLS, wire), world.place)


def examine_bytes_out_of_hosts(trial: Trial) -> None:
    """V for rings in any order, on one host or many, of some of the ranks, with large sizes; drawn ones."""
    two = {rank: "ab"[rank // 2] for rank in range(4)}
    uneven = {rank: "aaaabbc"[rank] for rank in range(7)}
    cases = {
        "4 ranks in blocks": ([0, 1, 2, 3], two, 4 * 10),
        "4 ranks, hosts alternate": ([0, 2, 1, 3], two, 4 * 10),
        "4 ranks, hosts alternate, twice the size": ([0, 2, 1, 3], two, 4 * 20),
        "4 ranks, the first and the last on one host": ([1, 2, 3, 0], two, 4 * 10),
        "4 ranks, other hosts": ([0, 2, 1, 3], {0: "a", 1: "a", 2: "a", 3: "b"}, 4 * 10),
        "2 ranks on 2 hosts": ([0, 2], two, 2 * 3),
        "2 ranks of one host": ([3, 2], two, 2 * 3),
        "3 hosts of unequal size": ([6, 0, 4, 1, 2, 5, 3], uneven, 7 * 11),
        "3 hosts in blocks, a large size": ([0, 1, 2, 3, 4, 5, 6], uneven, 7 * (10**17 + 1)),
        "a size above 2⁶⁴": ([6, 0, 4, 1, 2, 5, 3], uneven, 7 * (10**30 + 1)),
        "3 ranks of 7": ([5, 6, 1], uneven, 3 * 8),
        "a single rank": ([1], two, 12),
        "ranks far apart": ([40, 8, 3, 90], {8: "x", 3: "y", 90: "x", 40: "y"}, 4 * 5),
        "names that are nearly equal": ([0, 1, 2, 3, 4], dict(enumerate(["Box", "box", "box ", "box1", "box11"])), 5),
        "no bytes": ([0, 2, 1, 3], two, 0),
    }
    if trial.on_all_ranks:
        cases["1,010 ranks"] = list(range(1010)), {rank: f"h{rank % 7}" for rank in range(1010)}, 1010
    generator = trial.generator()
    for n in (6, 13):
        ring = torch.randperm(n, generator=generator).tolist()
        host_of = {rank: f"host {int(torch.randint(4, (1,), generator=generator))}" for rank in range(n + 2)}
        cases[f"{n} ranks, drawn with seed {trial.seed}"] = (ring, host_of, n * 1000)
    cases = {case: (ring, dict(host_of), size) for case, (ring, host_of, size) in cases.items()}
    expected = [_sent_by_hosts(*each) for each in cases.values()]
    for result, right in zip(trial.call_each(cases), expected, strict=True):
        trial.criterion("value", _wrong_bytes(result, right), "the result")
    trial.cost(calls={})


def _sent_by_hosts(ring: list[int], host_of: dict[int, str], size: int) -> dict[str, int]:
    """Message by message of a round, times the rounds."""
    sent = dict.fromkeys(host_of.values(), 0)
    rounds = 2 * (len(ring) - 1)  # in each of which every rank sends one part
    for sender, receiver in zip(ring, [*ring[1:], ring[0]], strict=True):
        if host_of[sender] != host_of[receiver]:
            sent[host_of[sender]] += rounds * (size // len(ring))
    return sent


def _wrong_bytes(result: object, right: dict[str, int]) -> str:
    if not isinstance(result, dict):
        return difference(result, right)
    for host, number in right.items():
        if host not in result:
            return f"has no entry for host {host!r}, should be {number:,}"
        if complaint := difference(result[host], number):
            return f"for host {host!r} {complaint}"
    others = [key for key in result if key not in right]
    return f"has an entry {others[0]!r}, which is no host, should be {shown(right)}" if others else ""


HIERARCHICAL_ALL_REDUCE = Exercise(hierarchical_all_reduce, examine_hierarchical_all_reduce)
BYTES_OUT_OF_HOSTS = Exercise(bytes_out_of_hosts, examine_bytes_out_of_hosts)
EXERCISES = (HIERARCHICAL_ALL_REDUCE, BYTES_OUT_OF_HOSTS)
