"""The references, which judge the learners' answers, held against one process, torch's own parts and counting by hand.

What needs ranks runs in one group of three and in one of four. `culprit` stands in test_planted_faults.py.
"""

import copy
import itertools
import random
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import DistributedSampler

from scratch_ddp.course.exercise import all_exercises
from scratch_ddp.course.lessons import lesson_13, lesson_15, lesson_16
from scratch_ddp.instruments.cost import (
    CLUSTERS,
    MODELS,
    Layout,
    Link,
    rank_memory,
    step_time,
    tokens_to_be_compute_bound,
)
from scratch_ddp.minimal.ddp import SimpleDistributedDataParallelism
from scratch_ddp.pipeline import simulate
from tests.ranks import run_ranks

XXL, H100 = MODELS["XXL"], CLUSTERS["H100"]
REFERENCES = SimpleNamespace(**{name: exercise.reference for name, exercise in all_exercises().items()})
ON_RANKS = {}  # what is called on every rank, by name: (rank, n) -> fails unless it holds


def on_ranks(holds):
    ON_RANKS[holds.__name__] = holds


def everyones(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def groups(rank, n):
    """All ranks, then, on all but rank 0, those."""
    others = dist.new_group(range(1, n))
    return (dist.group.WORLD, others) if rank else (dist.group.WORLD,)


@on_ranks
def sums_and_broadcasts_are_torchs(rank, n):
    for group, size in itertools.product(groups(rank, n), (1, 7, 12)):
        mine = torch.arange(size) + 10.0**rank
        sums, total = mine.clone(), mine.clone()
        dist.all_reduce(sums, group=group)
        assert_close(REFERENCES.ring_all_reduce(total, group), sums, rtol=0, atol=0)
        for root in dist.get_process_group_ranks(group):
            from_root, theirs, total = mine.clone(), mine.clone(), mine.clone()
            dist.broadcast(from_root, root, group)
            REFERENCES.tree_broadcast(theirs, root, group)
            REFERENCES.reduce(total, root, group)
            assert_close([theirs, total], [from_root, sums if rank == root else mine], rtol=0, atol=0)
        if group is dist.group.WORLD:
            REFERENCES.all_reduce_in_two_steps(mine, n - 1)
            assert_close(mine, sums, rtol=0, atol=0)


@on_ranks
def tensors_of_any_length_and_rows_arrive_as_objects_do(rank, n):
    mine = torch.arange(2.0 * rank) + 10 * rank
    assert_close(REFERENCES.all_gather_uneven(mine), everyones(mine), rtol=0, atol=0)
    for rows in (1, 2 * n - 1, 3 * n):
        weight = torch.randn(rows, 2)
        parts = [*weight.split(-(-rows // n)), *[weight[:0]] * n]
        assert_close(REFERENCES.gather_uneven(parts[rank], rows), weight, rtol=0, atol=0)
    counts = [(rank + to) % 3 for to in range(n)]
    leaving = (torch.randn(sum(counts), 2) + 10 * rank).split(counts)
    arriving = torch.cat([theirs[rank] for theirs in everyones(leaving)])
    assert_close(REFERENCES.send_rows(torch.cat(leaving), counts), arriving, rtol=0, atol=0)


@on_ranks
def gradients_of_data_parallelism_are_those_of_one_process(rank, n):
    model, x = network(), torch.randn(n * (n - 1), 3).double()
    batches = x.split([2 * each for each in range(n)])  # rank 0 has none
    one = copy.deepcopy(model)
    model(batches[rank]).square().mean().backward()
    if rank == 0:
        for gradient in gradients(model):
            gradient.fill_(torch.nan)
    REFERENCES.average_unequal(model, len(batches[rank]))
    one(x).square().mean().backward()
    assert_close(gradients(model), gradients(one))

    for each in (model, one):
        each.zero_grad()
        each[0].requires_grad_(False)
    if rank:  # on rank 0 all gradients are None
        model(x[rank:]).sum().backward()
    REFERENCES.average_gradients(model)
    (sum(one(x[each:]).sum() for each in range(1, n)) / n).backward()
    assert_close(gradients(model)[2:], gradients(one)[2:])
    assert gradients(model)[:2] == [None, None]


@on_ranks
def gradients_that_overlap_and_buckets_are_those_of_torchs_ddp(rank, n):
    model = network()
    theirs, hooked, bucketed = DistributedDataParallel(copy.deepcopy(model)), copy.deepcopy(model), model
    finishes = [
        REFERENCES.average_when_ready(hooked),
        REFERENCES.average_in_buckets([list(bucketed[2].parameters()), list(bucketed[0].parameters())]),
    ]
    for x in torch.randn(2, n, 5, 3).double():
        for each in (theirs, hooked, bucketed):
            each.zero_grad()
            each(x[rank]).square().sum().backward()
        for finish in finishes:
            finish()
        assert_close([gradients(hooked), gradients(bucketed)], [gradients(theirs)] * 2)
    own = copy.deepcopy(model)
    average = REFERENCES.average_through_buffer(list(own.parameters()))
    for times in (1.0, 2.0, 1.0):  # the second is added to the first
        if times == 1:
            own.zero_grad()
        own(x[rank]).square().sum().backward()
        average()
        assert_close(gradients(own), [times * each for each in gradients(theirs)])


@on_ranks
def scores_and_losses_are_those_of_the_whole_list(rank, n):
    items = 5 * n + 1
    right = torch.rand(items) < 0.6
    right[:n], right[-n:] = True, False  # the first are given out twice
    mine = right[list(DistributedSampler(right, n, rank, shuffle=False))]
    assert REFERENCES.accuracy_once(mine, items) == pytest.approx(right.sum().item() / items)
    losses, counts = torch.rand(n, 2, 6, requires_grad=True), torch.rand(n, 2, 6) < 0.5
    counts[0] = False
    part = REFERENCES.token_mean(losses[rank], counts[rank])
    part.backward()
    assert sum(everyones(part.item())) / n == pytest.approx(losses[counts].mean().item())
    (expected,) = torch.autograd.grad(losses[counts].mean(), losses)
    assert_close(losses.grad[rank] / n, expected[rank])


@on_ranks
def models_are_the_same_if_their_bits_are(rank, n):
    model = network().append(nn.BatchNorm1d(2))
    assert REFERENCES.same_on_all_ranks(model) is True
    model[-1].num_batches_tracked += rank == 1
    assert REFERENCES.same_on_all_ranks(model) is False


@on_ranks
def an_epoch_is_that_of_one_process(rank, n):
    model = SimpleDistributedDataParallelism(network())
    one, lr = copy.deepcopy(model.module), 0.1
    x, y = torch.randn(5, n, 4, 3).double(), torch.randn(5, n, 4, 2).double()
    batches = list(zip(x[:, rank], y[:, rank], strict=True))
    REFERENCES.train_epoch(model, torch.optim.SGD(model.parameters(), lr), batches, 2)
    for window in ([0, 1], [2, 3], [4]):
        loss = mse_loss(one(x[window]), y[window])
        for weight, gradient in zip(one.parameters(), torch.autograd.grad(loss, list(one.parameters())), strict=True):
            weight.data -= lr * gradient
    assert_close(list(model.parameters()), list(one.parameters()))


@on_ranks
def sharded_weights_are_trained_as_in_one_process(rank, n):
    weights = torch.randn(3, 2 * n, 2 * n).double()
    shards = [weight.split(2)[rank].clone() for weight in weights]
    x, targets = torch.randn(2, n, 4, 2 * n).double()
    REFERENCES.sharded_step(shards, x[rank], targets[rank], 0.1)
    output = ((x @ weights.requires_grad_()[0].T).relu() @ weights[1].T).relu() @ weights[2].T
    ((output - targets).square().sum() / 2).backward()
    assert_close(torch.stack(shards), (weights - 0.1 * weights.grad)[:, 2 * rank :][:, :2].detach())

    unit = network()
    one = copy.deepcopy(unit)
    shard = REFERENCES.shard_unit(unit)
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in ([shard], one.parameters())]
    for batch in torch.randn(2, n, 5, 3).double():
        unit(batch[rank].requires_grad_()).square().sum().backward()
        (one(batch).square().sum() / n).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    flat = nn.utils.parameters_to_vector(one.parameters())
    assert_close(torch.cat(everyones(shard.detach()))[: len(flat)], flat.detach())


@on_ranks
def a_sharded_optimizer_does_what_the_plain_one_does(rank, n):
    models = network(), network()
    models[1].load_state_dict(models[0].state_dict())
    params = list(models[0].parameters())
    own, step, zero_grad = REFERENCES.sharded_optimizer(params, torch.optim.AdamW)
    plain = torch.optim.AdamW(models[1].parameters())
    for x in torch.randn(2, n, 5, 3).double():
        models[0](x[rank]).square().sum().backward()
        models[1](x).square().sum().div(n).backward()
        REFERENCES.reduce_to_owners(params)
        means = [each if i % n == rank else None for i, each in enumerate(gradients(models[1]))]
        assert_close(gradients(models[0]), means)
        step(), zero_grad()
        plain.step(), plain.zero_grad()
        assert_close(params, list(models[1].parameters()))
    held = [sum(each.numel() for each in state.values() if each.dim()) for state in own.state.values()]
    assert held == [2 * each.numel() for each in params[rank::n]]


@on_ranks
def the_straggler_is_who_costs_the_others_most(rank, n):
    for called in torch.randint(9, (20, n, 3)):
        late = called.amax(dim=0) - called
        cost = [0] * n
        for k, last in enumerate(called.argmax(dim=0)):
            cost[last] += int(late[:, k].sum())
        assert REFERENCES.find_straggler(called[rank]) == cost.index(max(cost))


@on_ranks
def batch_norm_is_that_of_the_whole_batch(rank, n):
    x = (5 + torch.randn(n * (n + 1) // 2, 3)).double().requires_grad_()
    mine = x.detach().split([*range(1, n + 1)])[rank].requires_grad_()
    ours, whole = (nn.BatchNorm1d(3).double() for _ in range(2))
    REFERENCES.sync_batch_norm(mine, ours).pow(3).sum().backward()
    whole(x).pow(3).sum().backward()
    assert_close([mine.grad, *ours.buffers()], [x.grad.split([*range(1, n + 1)])[rank], *whole.buffers()])
    assert_close([sum(each) for each in zip(*everyones(gradients(ours)), strict=True)], gradients(whole))


@on_ranks
def sliced_layers_and_losses_are_the_whole_ones(rank, n):
    x, up, down = torch.randn(5, 4).double(), torch.randn(4, 2 * n).double(), torch.randn(2 * n, 3).double()
    mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    part = slice(2 * rank, 2 * rank + 2)
    f, g = REFERENCES.f_and_g()
    (g((f(mine) @ up[:, part]).tanh() @ down[part])).square().sum().backward()
    ((whole @ up).tanh() @ down).square().sum().backward()
    assert_close(mine.grad, whole.grad)

    logits, targets = (1000 * torch.randn(7, 2 * n).double()).requires_grad_(), torch.randint(2 * n, (7,))
    (loss := cross_entropy(logits, targets)).backward()
    found = REFERENCES.sliced_cross_entropy(logits.detach()[:, part].clone(), targets)
    assert_close(found, [loss.detach(), logits.grad[:, part]])


@on_ranks
def what_is_shifted_sends_its_gradient_back(rank, n):
    x, weights = torch.randn(2, n, 4)
    mine = x[rank].clone().requires_grad_()
    shifted = REFERENCES.shift(mine)
    (shifted * weights[rank]).sum().backward()
    assert_close([shifted.detach(), mine.grad], [x[rank - 1], weights[(rank + 1) % n]])


def all_hold():
    """On a rank: what went wrong, by name."""
    wrong = {}
    for name, holds in ON_RANKS.items():
        torch.manual_seed(0)
        try:
            holds(dist.get_rank(), dist.get_world_size())
        except Exception:
            wrong[name] = traceback.format_exc()
    return wrong


@pytest.fixture(scope="module")
def wrong():
    return {n: run_ranks(n, all_hold) for n in (3, 4)}


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("name", ON_RANKS)
def test_on_ranks(name, n, wrong):
    assert not [each[name] for each in wrong[n] if name in each]


def test_slice_qkv_takes_whole_heads_of_each():
    weight = torch.arange(8.0)[:, None]  # q0 … q3, k0, k1, v0, v1: heads of one row
    assert REFERENCES.slice_qkv(weight, 4, 2, 1, 2).flatten().tolist() == [2, 3, 5, 7]


def test_a_forecast_and_the_bytes_of_a_stage_are_those_of_a_sum_by_hand():
    timed = {1_000: 101e-6, 101_000: 201e-6}  # 100 us, and 1 ns a byte
    assert REFERENCES.forecast_step([1_000_000, 3_000_000], timed, 4) == pytest.approx(2 * 100e-6 + 1.5 * 4e-3)
    assert [REFERENCES.bytes_held(1_000, 4, stage) for stage in range(4)] == [16_000, 10_000, 7_000, 4_000]


def test_a_step_in_parts_and_what_sticks_out_are_those_of_a_count_second_by_second():
    draw = random.Random(0)

    def stretches(several):
        return [tuple(sorted(draw.sample(range(12), 2))) for _ in range(several)]

    for _ in range(100):
        computing, mine, start = stretches(2), sorted(stretches(2)), draw.randrange(4)
        other = [(draw.randrange(end + 1), end) for _, end in mine]
        counted = [0, 0, 0, 0]
        for second in range(start, 9):
            busy = any(a <= second < b for a, b in computing)
            called = [a <= second < b for a, b in mine]
            ready = any(here and a <= second for here, (a, _) in zip(called, other, strict=True))
            counted[0 if busy else 2 if ready else 1 if any(called) else 3] += 1
        assert REFERENCES.split_step(0, (start, 9), computing, [mine, other]) == counted
        exposed = [any(a <= t < b for a, b in mine) and not any(a <= t < b for a, b in computing) for t in range(12)]
        assert REFERENCES.exposed_time(computing, mine) == sum(exposed)


@pytest.mark.parametrize("forward, backward, hop", [(1, 2, 0), (1, 2, 0.125), (1, 2, 1.5), (1, 2, 1.625), (2, 2, 8)])
def test_so_many_forwards_ahead_and_neither_waits_and_one_fewer_and_one_does(forward, backward, hop):
    def between_two(k):
        rows = lesson_13.with_forwards_ahead(2, 60, k)
        starts = [
            start for action, start, _ in simulate(rows, {"F": forward, "B": backward}, hop)[0] if action[0] == "B"
        ]
        return (starts[40] - starts[20]) / 20

    k = lesson_13.forwards_ahead(forward, backward, hop)
    assert between_two(k) == forward + backward
    assert k == 1 or between_two(k - 1) > forward + backward


@pytest.mark.parametrize("dp, tp, pp, stage", [(4, 1, 1, 0), (8, 8, 1, 1), (2, 8, 6, 1), (1, 4, 63, 0)])
def test_bytes_and_gpus_are_those_of_the_package(dp, tp, pp, stage):
    layout = Layout(dp, tp, pp, 1, pp + 1, ("DDP", "ZeRO-1")[stage])
    ours = lesson_15.bytes_of_rank(lesson_15.XXL, dp, tp, pp, stage, 2048)
    assert ours == pytest.approx(rank_memory(XXL, layout, 2048).total)
    n = lesson_15.devices_needed(XXL.parameters, 80 * 10**9, 3, 10**10)
    held = [lesson_15.bytes_of_rank(lesson_15.XXL, each, 1, 1, 3, 0) + 10**10 for each in (n - 1, n)]
    assert held[1] <= 80 * 10**9 < held[0]


def test_tokens_and_seconds_are_those_of_the_package():
    for n in (2, 8, 100):
        found = lesson_15.smallest_batch(989e12, 50e9, 1e-5, XXL.block, n)
        assert found == tokens_to_be_compute_bound(989e12, Link(1e-5, 1 / 50e9).wire(n), XXL.block)
    blocks = replace(MODELS["Llama-3-70B"], vocabulary=0, kv_heads=64, norm_vectors=0)  # nothing but matrices
    layouts = Layout(), Layout(1, 8, checkpointing=True), Layout(4, 2, 4, 1, 8, "ZeRO-1"), Layout(1, 1, 4, 1, 8)
    for layout in layouts:
        whole = step_time(blocks, layout, H100, 64).total  # of so few tokens that the scores hardly count
        assert lesson_15.step_seconds(blocks, layout, H100, 64) == pytest.approx(whole, rel=0.02)


def test_a_resumed_run_sees_each_item_of_an_epoch_once_however_often_the_ranks_change():
    saved = {"seed": 5, "items": 50, "ranks": 4, "per_rank": 3, "done": 0}
    seen = []
    for n, steps in itertools.cycle([(4, 2), (3, 1), (1, 4), (6, 3)]):
        seen += [
            sum(parts, []) for parts in zip(*(lesson_16.resume(saved, r, n, steps) for r in range(n)), strict=True)
        ]
        saved["done"] += steps
        if len(seen) >= 10:
            break
    assert [sorted(sum(seen[5 * epoch :][:5], [])) for epoch in (0, 1)] == [list(range(50))] * 2
    assert sum(seen[:5], []) != sum(seen[5:10], [])


def test_the_saving_interval_loses_least_in_a_simulation():
    def lost(interval, save=20, between=7200):
        draw, clock, kept = random.Random(0), 0.0, 0.0
        for _ in range(20_000):
            life = draw.expovariate(1 / between)
            kept, clock = kept + interval * (life // (interval + save)), clock + life
        return 1 - kept / clock

    best = lesson_16.saving_interval(20, 0, 1, 12)
    assert lost(best) < min(lost(0.6 * best), lost(1.6 * best))


def test_a_ring_sends_out_of_hosts_what_its_messages_say():
    torch.manual_seed(0)
    ring, host_of = torch.randperm(6).tolist(), {rank: "abc"[rank % 3] for rank in range(8)}
    sent = dict.fromkeys("abc", 0)
    for _, place in itertools.product(range(2 * 5), range(6)):  # rounds, ranks
        here, there = host_of[ring[place]], host_of[ring[(place + 1) % 6]]
        sent[here] += 10 * (here != there)
    assert lesson_16.bytes_out_of_hosts(ring, host_of, 60) == sent


def test_the_groups_of_a_mesh_are_the_lines_of_its_block_of_numbers():
    mesh = {"dp": 2, "pp": 3, "tp": 4}
    block = torch.arange(24).view(*mesh.values())
    for dim, name in enumerate(mesh):
        assert REFERENCES.which_ranks(mesh, name) == sorted(block.movedim(dim, -1).flatten(0, 1).tolist())
