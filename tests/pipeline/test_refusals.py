"""What can't be done is refused in a sentence, on every rank alike, and the ranks can go on afterwards."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import Action, Pipeline, gpipe, layers_of, one_f_one_b
from scratch_ddp.pipeline.module import _main_memory_group
from tests.pipeline.cases import alone, batch, build, distance, message_of, pipeline_of
from tests.ranks import run_ranks


def build_with(**settings):
    settings = {"layers": build(4), "n_micro": 4} | settings
    return lambda: Pipeline(**settings)


def without(action: Action):
    return [[each for each in row if each != action] for row in one_f_one_b(2, 4)]


class Model(nn.Module):
    pass


REFUSED = {
    "n_micro must be a number of micro-batches, 1 or more, not 0": build_with(n_micro=0),
    "n_micro must be a number of micro-batches, 1 or more, not 2.0": build_with(n_micro=2.0),
    "schedule must be one of 'gpipe', '1f1b', 'interleaved', 'zb_h1' or rows, not '2f2b'": build_with(schedule="2f2b"),
    "interleaved needs a multiple of 2 micro-batches on 2 ranks, not 3": build_with(schedule="interleaved", n_micro=3),
    "the schedule has 3 rows, but there are 2 ranks": build_with(schedule=gpipe(3, 4)),
    "schedule must be a name or a row of actions for each rank, not 7": build_with(schedule=7),
    "rows must hold actions (kind, stage, micro-batch), not 'F0'": build_with(schedule=[["F0"], ["F0"]]),
    "B2 of stage 1 is missing": build_with(schedule=without(Action("B", 1, 2))),
    "stage 0 must be on one rank, and is on ranks 0, 1": build_with(schedule=[gpipe(1, 4)[0]] * 2),
    "the schedule deadlocks: rank 0, at B": build_with(schedule=[row[::-1] for row in gpipe(2, 4)]),
    "1 layers can't be cut into 2 stages: use fewer ranks or fewer stages": build_with(layers=build(1)),
    "layers must be modules, but number 1 is a int": build_with(layers=[nn.Linear(2, 2), 3]),
    "ahead must be a number of actions, 0 or more, not -1": build_with(ahead=-1),
    "a Model can't be cut, only an nn.Sequential": build_with(layers=Model()),
    "costs has 3 numbers, but there are 4 layers": build_with(costs=[1, 2, 3]),
    "cuts must be 1 growing numbers from 1 to 3, to cut 4 layers into 2 stages, not [4]": build_with(cuts=[4]),
    "cuts must be 1 growing numbers from 1 to 3, to cut 4 layers into 2 stages, not [1, 2]": build_with(cuts=[1, 2]),
    "loss must be a function of output and target, not None": build_with(loss=None),
    "'1.weight' is on the meta device": build_with(layers=[nn.Linear(2, 2), nn.Linear(2, 2, device="meta")]),
}


def refusals(where: list[int]) -> dict[str, str]:
    mine = dist.get_rank() in where
    return {expected: message_of(build if mine else build_with()) for expected, build in REFUSED.items()}


@pytest.mark.parametrize(("where", "who"), [([0, 1], "ranks 0, 1: "), ([1], "rank 1: ")])
def test_what_can_not_be_built(where, who):
    for said in run_ranks(2, refusals, where):
        for expected, message in said.items():
            assert expected in message and message.startswith(who), message


def different_builds() -> tuple[str, ...]:
    rank = dist.get_rank()
    return tuple(
        message_of(build)
        for build in (
            build_with(layers=build(4 + rank)),
            build_with(n_micro=4 + rank),
            build_with(schedule=("1f1b", "gpipe")[rank]),
            build_with(cuts=[1 + rank]),
            build_with(ahead=rank),
        )
    )


def test_ranks_that_build_different_pipelines():
    first, second = run_ranks(2, different_builds)
    assert first == second
    assert all(
        each.startswith("the ranks build different pipelines; do the same everywhere\nrank 1: ") for each in first
    )


def no_batch() -> None:
    pipeline, (x, y), rank = pipeline_of(build(4), 4), batch(8), dist.get_rank()
    before = [each.clone() for each in pipeline.parameters()]
    for call, expected in (
        (
            lambda: pipeline.step(x[:3], y[:3]),
            "rank 0: x has 3 items, too few for 4 micro-batches\nrank 1: y has 3 items",
        ),
        (lambda: pipeline.step(x, y[:7]), "x has 8 items and y 7"),
        (
            lambda: pipeline.step(x if rank else None, y),
            "rank 0: x must be a tensor with an entry for each item, not None",
        ),
        (lambda: pipeline.step(x, [1]), r"rank 1: y must be a tensor with an entry for each item, not \[1\]"),
        (lambda: pipeline.step(x, torch.tensor(1.0)), "rank 1: y must be a tensor"),
        (lambda: (pipeline.evaluate if rank else pipeline.step)(x, y), "call different methods.*\n.*evaluate.*step"),
        (lambda: pipeline.step(x, y, everywhere=bool(rank)), "call different methods.*\n.*True.*False"),
    ):
        with traffic() as counted:
            said = message_of(call)
        assert re.match(expected, said) or re.search(expected, said), said
        assert counted.calls == {"barrier": 1}, "nothing is sent"
    assert all(each.grad is None for each in pipeline.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, pipeline.parameters(), strict=True))


def test_batches_that_do_not_fit():
    run_ranks(2, no_batch)


def fails_when(whole: nn.Module, at: int, when: str):
    """Make layer `at` raise in its forward or backward, in micro-batch 1, until the attribute `broken` is deleted."""
    layer = whole[at]
    layer.calls, layer.broken = 0, True

    def check(module: nn.Module, *_) -> None:
        module.calls += 1
        if hasattr(module, "broken") and module.calls == 2:
            raise RuntimeError("the stage is broken")

    layer.register_forward_pre_hook(check) if when == "forward" else layer.register_full_backward_hook(check)


def failing(schedule: str, when: str, new_sizes: bool) -> list[str]:
    p, whole, healthy = dist.get_world_size(), build(8), build(8)
    fails_when(whole, 4, when)
    pipeline, (x, y) = pipeline_of(whole, p, schedule), batch(5 * p)
    layer = dict(pipeline.local_module.named_children()).get("4")
    if not new_sizes:
        if layer:
            layer.calls = -10
        pipeline.step(x, y)
        pipeline.zero_grad()
        if layer:
            layer.calls = 0
    said = message_of(lambda: pipeline.step(x, y))
    assert all(each.grad is None for each in pipeline.parameters()), "half a step's gradients are dropped"
    if layer:
        del layer.broken
    alone(healthy, x, y)
    for _ in range(2):  # once with headers, once without
        pipeline.zero_grad()
        pipeline.step(x, y)
        assert distance(pipeline, healthy) < 1e-12
    return said


@pytest.mark.parametrize("new_sizes", [True, False], ids=["new sizes", "known sizes"])
@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_h1"])
def test_a_stage_that_fails(schedule, when, new_sizes):
    for said in run_ranks(4, failing, schedule, when, new_sizes):
        stage, home = (4, 0) if schedule == "interleaved" else (2, 2)
        assert said.startswith(f"rank {home}: stage {stage}"), said
        assert f"in the {when} of micro-batch 1: RuntimeError: the stage is broken" in said, said


def wrong_outputs() -> list[str]:
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    class Whole(nn.Module):
        def forward(self, x):
            return x.long()

    class Shrinks(nn.Module):
        def forward(self, x):
            return x[: 1 + int(x[0, 0, 0] > 0)]

    (x, y), said = batch(4), []
    x[:, 0, 0] = 1
    for stage in (nn.Linear(6, 5), Two(), Whole()):
        pipeline = pipeline_of(nn.Sequential(stage.double(), nn.Linear(6, 6).double()), 2, cuts=[1])
        said.append(message_of(lambda pipeline=pipeline: pipeline.step(x, y)))
    pipeline = pipeline_of(nn.Sequential(Shrinks(), nn.Linear(6, 6).double()), 2, cuts=[1])
    pipeline.step(x, y)
    x[2:, 0, 0] = -1
    said.append(message_of(lambda: pipeline.step(x, y)))
    pipeline = pipeline_of(build(4), 2)
    pipeline.loss = (
        nn.functional.mse_loss if dist.get_rank() == 0 else lambda output, target: (output - target).square()
    )
    said.append(message_of(lambda: pipeline.step(x, y)))
    return said


def test_outputs_that_do_not_fit_the_next_stage():
    first, second = run_ranks(2, wrong_outputs)
    assert first == second
    shapes, two, whole, shrinks, loss = first
    assert "the loss must be one number in a tensor, not float64 (2, 3, 6)" in loss
    assert re.match(
        r"rank 1: stage 1, which got float64 \(2, 3, 5\), failed in the forward of micro-batch 0: .*6x6", shapes
    )
    assert "rank 0: stage 0 failed" in two and "one tensor of floating-point numbers, not a tuple" in two
    assert "one tensor of floating-point numbers, not int64 (2, 3, 6)" in whole
    assert "put out float64 (1, 3, 6), and float64 (2, 3, 6) before, for inputs of the same size" in shrinks


def groups() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    assert "pass the one to spread over" in message_of(build_with(group=mesh))
    pair = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        pipeline, whole, (x, y) = pipeline_of(build(4), 2, group=pair), build(4), batch(5)
        pipeline.step(x, y)
        alone(whole, x, y)
        assert distance(pipeline, whole) < 1e-12
    else:
        with pytest.raises(ValueError, match="is not in the group"):
            Pipeline(build(4), 2, group=pair)


def between_gpus() -> float:
    pair = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return 2.0
    if dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)  # torch would name this rank's next group differently
    sum_of_ranks = torch.ones(1)
    dist.all_reduce(sum_of_ranks, group=_main_memory_group(pair))
    return sum_of_ranks.item()


def test_messages_between_gpus_get_a_group_also_where_a_rank_has_others():
    assert run_ranks(4, between_gpus, timeout=10) == [2.0] * 4


def test_groups_and_meshes():
    run_ranks(4, groups)


def test_a_decoder_whose_blocks_need_a_mask():
    pytest.importorskip("transformers")
    from scratch_ddp.benchmark.steps import build_llama

    model = build_llama(num_hidden_layers=1, hidden_size=12, intermediate_size=8, vocab_size=8)
    assert len(layers_of(model)) == 3
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="load it with attn_implementation='sdpa'"):
        layers_of(model)
