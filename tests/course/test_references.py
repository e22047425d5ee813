"""The references, which judge the learners' answers, held against one process and against counting by hand.

What needs ranks runs in one group of three and in one of four: each function yields pairs of what the references give
on this rank and of what one process gives. Not here: `culprit`, which stands in test_planted_faults.py, what is the
package's own (`tree_broadcast`, `reduce`, `sync_batch_norm`), what a lesson compares with one process itself
(`sharded_step`), and what the table of wrong answers says (`same_on_all_ranks`, `forecast_step`).
"""

import inspect
import itertools
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.testing import assert_close
from torch.utils.data import DistributedSampler

from scratch_ddp.course.exercise import all_exercises
from scratch_ddp.course.inputs import host_logs
from scratch_ddp.course.lessons.lesson_15 import XXL as BLOCKS
from scratch_ddp.instruments import cost
from scratch_ddp.instruments.cost import Layout
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism
from scratch_ddp.pipeline import one_f_one_b, simulate
from tests.ranks import in_turn

R = SimpleNamespace(**{name: exercise.reference for name, exercise in all_exercises().items()})
XXL, H100 = cost.MODELS["XXL"], cost.CLUSTERS["H100"]


def network():
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def sums(rank, n):
    for members, size in itertools.product((range(n), range(1, n)), (2, 7)):
        group, tensors = dist.new_group(list(members)), [torch.arange(size) + 10.0**each for each in range(n)]
        if rank in members:
            total = sum(tensors[each] for each in members)
            yield R.ring_all_reduce(tensors[rank].clone(), group), total
    R.all_reduce_in_two_steps(tensors[rank], n - 1)
    yield tensors[rank], torch.arange(size) * n + sum(10.0**each for each in range(n))


def tensors_of_any_length_and_rows(rank, n):
    tensors = [torch.arange(2.0 * each) + 10 * each for each in range(n)]
    yield R.all_gather_uneven(tensors[rank]), tensors
    for rows in (1, 2 * n - 1, 3 * n):
        weight = torch.arange(2.0 * rows).view(rows, 2)
        parts = [*weight.split(-(-rows // n)), *[weight[:0]] * n]
        yield R.gather_uneven(parts[rank], rows), weight
    counts = [[(source + to) % 3 for to in range(n)] for source in range(n)]
    leaving = [(torch.randn(sum(each), 2)).split(each) for each in counts]
    yield R.send_rows(torch.cat(leaving[rank]), counts[rank]), torch.cat([each[rank] for each in leaving])


def means_of_gradients(rank, n):
    model, one = network(), network()
    x = torch.randn(n * (n - 1), 3).double()
    batch = x.split([2 * each for each in range(n)])[rank]  # rank 0 has none, and so NaN for gradients
    model(batch).square().mean().backward()
    R.average_unequal(model, len(batch))
    one(x).square().mean().backward()
    yield gradients(model), gradients(one)
    for each in (model, one):
        each.zero_grad()
        each[0].requires_grad_(False)
    if rank:  # on rank 0 all gradients are None
        model(x[rank]).sum().backward()
    R.average_gradients(model)
    (one(x[1:n]).sum() / n).backward()
    yield gradients(model)[2:], gradients(one)[2:]
    yield str(gradients(model)[:2]), "[None, None]"


def means_that_are_sent_in_backward(rank, n):
    one, *models = (network() for _ in range(4))
    layers = [list(models[1][layer].parameters()) for layer in (2, 0)]
    through_buffer = R.average_through_buffer(list(models[2].parameters()))
    finish = [R.average_when_ready(models[0]), R.average_in_buckets(layers), through_buffer]
    for x in torch.randn(2, n, 5, 3).double():
        for each in (one, *models):
            each.zero_grad()
        one(x).square().sum().div(n).backward()
        for model, end in zip(models, finish, strict=True):
            model(x[rank]).square().sum().backward()
            end()
            yield gradients(model), gradients(one)
    models[2](x[rank]).square().sum().backward()  # onto what is there
    through_buffer()
    yield gradients(models[2]), [2 * each for each in gradients(one)]


def scores_and_losses(rank, n):
    items = 5 * n + 1
    right = torch.rand(items) < 0.6
    right[:n], right[-n:] = True, False  # the first are given out twice
    mine = right[list(DistributedSampler(right, n, rank, shuffle=False))]
    yield R.accuracy_once(mine, items), right.sum().item() / items
    losses, counts = torch.rand(n, 2, 6, requires_grad=True), torch.rand(n, 2, 6) < 0.5
    counts[0] = False
    (part := R.token_mean(losses[rank], counts[rank])).backward()
    (expected,) = torch.autograd.grad(losses[counts].mean(), losses)
    dist.all_reduce(mean := part.detach() / n)
    yield [mean, losses.grad[rank] / n], [losses[counts].mean().detach(), expected[rank]]


def an_epoch(rank, n):
    model, one, lr = SimpleDistributedDataParallelism(network()), network(), 0.1
    x, y = torch.randn(5, n, 4, 3).double(), torch.randn(5, n, 4, 2).double()
    batches = list(zip(x[:, rank], y[:, rank], strict=True))
    R.train_epoch(model, torch.optim.SGD(model.parameters(), lr), batches, 2)
    for window in ([0, 1], [2, 3], [4]):
        one.zero_grad()
        mse_loss(one(x[window]), y[window]).backward()
        torch.optim.SGD(one.parameters(), lr).step()
    yield list(model.parameters()), list(one.parameters())


def a_unit(rank, n):
    unit, one = network(), network()
    shard = R.shard_unit(unit)
    for batch in torch.randn(2, n, 5, 3).double():
        unit(batch[rank].requires_grad_()).square().sum().backward()
        (one(batch).square().sum() / n).backward()
        for each in ([shard], one.parameters()):
            optimizer = torch.optim.SGD(each, lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    flat = nn.utils.parameters_to_vector(one.parameters()).detach()
    yield shard.detach(), nn.functional.pad(flat, (0, -len(flat) % n)).chunk(n)[rank]


def sharded_state(rank, n):
    model, one = network(), network()
    params = list(model.parameters())
    own, step, zero_grad = R.sharded_optimizer(params, torch.optim.AdamW)
    plain = torch.optim.AdamW(one.parameters())
    for x in torch.randn(2, n, 5, 3).double():
        model(x[rank]).square().sum().backward()
        one(x).square().sum().div(n).backward()
        R.reduce_to_owners(params)
        owned = [i for i in range(len(params)) if gradients(model)[i] is not None]
        yield [gradients(model)[i] for i in owned], gradients(one)[rank::n]
        step(), zero_grad()
        plain.step(), plain.zero_grad()
        yield params, list(one.parameters())
    yield sum(each["exp_avg"].numel() for each in own.state.values()), sum(each.numel() for each in params[rank::n])


def sliced_layers(rank, n):
    x, up, down = torch.randn(5, 4).double(), torch.randn(4, 2 * n).double(), torch.randn(2 * n, 3).double()
    mine, whole, part = x.clone().requires_grad_(), x.clone().requires_grad_(), slice(2 * rank, 2 * rank + 2)
    f, g = R.f_and_g()
    (g((f(mine) @ up[:, part]).tanh() @ down[part])).square().sum().backward()
    ((whole @ up).tanh() @ down).square().sum().backward()
    yield mine.grad, whole.grad
    logits, targets = (1000 * torch.randn(7, 2 * n).double()).requires_grad_(), torch.randint(2 * n, (7,))
    (loss := cross_entropy(logits, targets)).backward()
    found = R.sliced_cross_entropy(logits.detach()[:, part].clone(), targets)
    yield found, [loss.detach(), logits.grad[:, part]]
    x, weights = torch.randn(2, n, 4)
    (shifted := R.shift(mine := x[rank].clone().requires_grad_())).mul(weights[rank]).sum().backward()
    yield [shifted.detach(), mine.grad], [x[rank - 1], weights[(rank + 1) % n]]


ON_RANKS = [(pairs,) for pairs in list(globals().values()) if inspect.isgeneratorfunction(pairs)]


def compare(pairs):
    torch.manual_seed(1)
    for found, expected in pairs(dist.get_rank(), dist.get_world_size()):
        assert found == expected if isinstance(found, str) else assert_close(found, expected) is None


@pytest.mark.parametrize("n", [3, 4])
def test_on_ranks(n):
    in_turn(n, compare, ON_RANKS)


def test_heads_and_bytes_are_those_by_hand():
    weight = torch.arange(8.0)[:, None]  # q0 … q3, k0, k1, v0, v1: heads of one row
    assert R.slice_qkv(weight, 4, 2, 1, 2).flatten().tolist() == [2, 3, 5, 7]
    assert [R.bytes_held(1_000, 4, stage) for stage in range(4)] == [16_000, 10_000, 7_000, 4_000]


def test_a_step_in_parts_and_what_sticks_out_are_those_of_a_count_second_by_second():
    draw = random.Random(0)
    for _ in range(100):
        computing, mine = ([tuple(sorted(draw.sample(range(12), 2))) for _ in range(2)] for _ in range(2))
        mine, start, counted = sorted(mine), draw.randrange(4), [0, 0, 0, 0]
        other = [(draw.randrange(end + 1), end) for _, end in mine]
        for second in range(start, 9):
            busy = any(a <= second < b for a, b in computing)
            called = [a <= second < b for a, b in mine]
            ready = any(here and a <= second for here, (a, _) in zip(called, other, strict=True))
            counted[0 if busy else 2 if ready else 1 if any(called) else 3] += 1
        assert R.split_step(0, (start, 9), computing, [mine, other]) == counted
        exposed = [any(a <= t < b for a, b in mine) and not any(a <= t < b for a, b in computing) for t in range(12)]
        assert R.exposed_time(computing, mine) == sum(exposed)


@pytest.mark.parametrize("forward, backward, hop", [(1, 2, 0), (1, 2, 0.125), (1, 2, 1.5), (1, 2, 1.625), (2, 2, 8)])
def test_so_many_forwards_ahead_and_neither_waits_and_one_fewer_and_one_does(forward, backward, hop):
    def between_two(k):
        first = simulate(one_f_one_b(2, 60, ahead=k), {"F": forward, "B": backward}, hop)[0]
        starts = [start for action, start, _ in first if action[0] == "B"]
        return (starts[40] - starts[20]) / 20

    k = R.forwards_ahead(forward, backward, hop)
    assert between_two(k) == forward + backward
    assert k == 1 or between_two(k - 1) > forward + backward


@pytest.mark.parametrize("dp, tp, pp, stage", [(4, 1, 1, 0), (8, 8, 1, 1), (2, 8, 6, 1), (1, 4, 63, 0)])
def test_bytes_and_gpus_are_those_of_the_package(dp, tp, pp, stage):
    layout = Layout(dp, tp, pp, 1, pp + 1, ("DDP", "ZeRO-1")[stage])
    ours = R.bytes_of_rank(BLOCKS, dp, tp, pp, stage, 2048)
    assert ours == pytest.approx(cost.rank_memory(XXL, layout, 2048).total)
    n = R.devices_needed(XXL.parameters, 80 * 10**9, 3, 10**10)
    held = [R.bytes_of_rank(BLOCKS, each, 1, 1, 3, 0) + 10**10 for each in (n - 1, n)]
    assert held[1] <= 80 * 10**9 < held[0]


def test_tokens_and_seconds_are_those_of_the_package():
    for n in (2, 8, 100):
        wire = cost.Link(1e-5, 1 / 50e9).wire(n)
        tokens = cost.tokens_to_be_compute_bound(989e12, wire, XXL.block)
        assert R.smallest_batch(989e12, 50e9, 1e-5, XXL.block, n) == tokens
    blocks = replace(cost.MODELS["Llama-3-70B"], vocabulary=0, kv_heads=64, norm_vectors=0)  # nothing but matrices
    for layout in (Layout(), Layout(1, 8, checkpointing=True), Layout(4, 2, 4, 1, 8, "ZeRO-1"), Layout(1, 1, 4, 1, 8)):
        whole = cost.step_time(blocks, layout, H100, 64).total  # of so few tokens that the scores hardly count
        assert R.step_seconds(blocks, layout, H100, 64) == pytest.approx(whole, rel=0.02)


def test_a_resumed_run_sees_each_item_of_an_epoch_once_however_often_the_ranks_change():
    saved, seen = {"seed": 5, "items": 50, "ranks": 4, "per_rank": 3, "done": 0}, []
    for n, steps in ((4, 2), (3, 1), (1, 4), (6, 3)):
        parts = zip(*(R.resume(saved, rank, n, steps) for rank in range(n)), strict=True)
        seen += [sum(each, []) for each in parts]
        saved["done"] += steps
    assert [sorted(sum(seen[5 * epoch :][:5], [])) for epoch in (0, 1)] == [list(range(50))] * 2
    assert sum(seen[:5], []) != sum(seen[5:10], [])


def test_each_cause_is_recorded_on_either_host_and_found_and_nothing_of_the_machine_they_are_from():
    faults = set()
    for recording in host_logs.recordings():
        logs, text = host_logs.read_logs(recording), (host_logs.FOLDER / f"{recording}.txt").read_text(encoding="utf-8")
        assert text.startswith("# fault: " + ", ".join(fault := R.faulty_host(logs)))
        for host, log in logs.items():
            assert log.startswith(f"+ hostname\n{host}\n") and not re.search(r"/(home|root|tmp|work|usr)/", log)
        faults.add(fault)
    assert faults == {(host, cause) for host in ("alder", "birch") for cause in ("interface", "name", "version")}


def test_a_ring_sends_out_of_hosts_what_its_messages_say():
    torch.manual_seed(0)
    ring, host_of = torch.randperm(6).tolist(), {rank: "abc"[rank % 3] for rank in range(8)}
    sent = dict.fromkeys("abc", 0)
    for _, place in itertools.product(range(2 * 5), range(6)):  # rounds, ranks
        here, there = host_of[ring[place]], host_of[ring[(place + 1) % 6]]
        sent[here] += 10 * (here != there)
    assert R.bytes_out_of_hosts(ring, host_of, 60) == sent
