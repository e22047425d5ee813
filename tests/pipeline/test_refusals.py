"""What can't be done is refused in a sentence, on every rank alike, and the ranks can go on afterwards."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import Action, Pipeline, gpipe, layers_of, one_f_one_b
from tests.pipeline.cases import alone, batch, build, distance, message_of, pipeline_of
from tests.ranks import run_ranks

DIFFERENT = "the ranks build different pipelines; do the same everywhere\nrank 1: "
ONE_LESS = [[each for each in row if each != Action("B", 1, 2)] for row in one_f_one_b(2, 4)]
BUILT = [  # what rank 1 passes, and what both ranks say
    ({"n_micro": 0}, "rank 1: n_micro must be a number of micro-batches, 1 or more, not 0"),
    (
        {"schedule": "2f2b"},
        "rank 1: schedule must be one of 'gpipe', '1f1b', 'interleaved', 'zb_h1' or rows, not '2f2b'",
    ),
    ({"schedule": gpipe(3, 4)}, "rank 1: the schedule has 3 rows, but there are 2 ranks"),
    ({"schedule": ONE_LESS}, "rank 1: B2 of stage 1 is missing"),
    ({"layers": build(1)}, "rank 1: 1 layers can't be cut into 2 stages: use fewer ranks or fewer stages"),
    ({"layers": [nn.Linear(2, 2), 3]}, "rank 1: TypeError: layers must be modules, but number 1 is a int"),
    ({"layers": nn.Bilinear(2, 2, 2)}, "rank 1: TypeError: a Bilinear can't be cut, only an nn.Sequential"),
    ({"cuts": [4]}, "rank 1: cuts must be 1 growing numbers from 1 to 3, to cut 4 layers into 2 stages, not [4]"),
    ({"layers": build(4).to("meta")}, "rank 1: '0.norm.weight' is on the meta device"),
    ({"layers": build(5)}, DIFFERENT),
    ({"n_micro": 5}, DIFFERENT),
    ({"schedule": "gpipe"}, DIFFERENT),
    ({"cuts": [1]}, DIFFERENT),
]


def test_what_can_not_be_built():
    def ranks():
        for settings, says in BUILT:
            mine = {"layers": build(4), "n_micro": 4} | (settings if dist.get_rank() else {})
            said = message_of(lambda mine=mine: Pipeline(**mine))
            assert said.startswith(says), said

    run_ranks(2, ranks)


def no_batch() -> None:
    pipeline, (x, y), rank = pipeline_of(build(4), 4), batch(8), dist.get_rank()
    for call, says in (
        (lambda: pipeline.step(x[:3], y), "rank 0: x has 3 items, too few for 4 micro-batches"),
        (lambda: pipeline.step(x, y[:7]), "x has 8 items and y 7"),
        (lambda: pipeline.step(None, y), "rank 0: x must be a tensor with an entry for each item, not None"),
        (lambda: pipeline.step(x, torch.tensor(1.0)), "rank 1: y must be a tensor"),
        (lambda: (pipeline.evaluate if rank else pipeline.step)(x, y), "some ranks call step, others evaluate"),
    ):
        with traffic() as counted:
            said = message_of(call)
        assert said.startswith(says), said
        assert counted.calls == {"barrier": 1}, "nothing is sent"


def test_batches_that_do_not_fit():
    run_ranks(2, no_batch)


class Breaks(nn.Module):
    """Raises in the forward or backward of micro-batch 1, from `arm` on."""

    def __init__(self, when: str):
        super().__init__()
        self.when, self.calls = when, 2  # not yet

    def arm(self) -> None:
        self.calls = 0

    def forward(self, x):
        y = x.clone()
        y.register_hook(lambda _: self.check("backward"))
        self.check("forward")
        return y

    def check(self, now: str) -> None:
        self.calls += now == self.when
        if now == self.when and self.calls == 2:
            raise RuntimeError("the stage is broken")


def failing(schedule: str, when: str, new_sizes: bool) -> list[str]:
    p, healthy, breaks = dist.get_world_size(), build(8), Breaks(when)
    whole = nn.Sequential(*healthy[:4], nn.Sequential(breaks, healthy[4]), *healthy[5:])
    pipeline, (x, y) = Pipeline(whole, p, schedule, mse_loss), batch(5 * p)
    if not new_sizes:
        pipeline.step(x, y)
    breaks.arm()
    said = message_of(lambda: pipeline.step(x, y))
    assert all(each.grad is None for each in pipeline.parameters()), "half a step's gradients are dropped"
    whole = copy.deepcopy(whole)
    alone(whole, x, y)
    for _ in range(2):  # once with headers, once without
        pipeline.zero_grad()
        pipeline.step(x, y)
        assert distance(pipeline, whole) < 1e-12
    return said


@pytest.mark.parametrize(
    ("schedule", "when", "new_sizes"),
    [("interleaved", "forward", True), ("interleaved", "backward", True), ("zb_h1", "forward", False)],
)
def test_a_stage_that_fails(schedule, when, new_sizes):
    for said in run_ranks(4, failing, schedule, when, new_sizes):
        stage, home = (4, 0) if schedule == "interleaved" else (2, 2)
        assert said.startswith(f"rank {home}: stage {stage}"), said
        assert f"in the {when} of micro-batch 1: RuntimeError: the stage is broken" in said, said


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


OUTPUTS = {  # a first stage, and what every rank says
    r"rank 1: stage 1, which got float64 \(2, 3, 5\), failed in the forward of micro-batch 0: .*6x6": lambda x: x[
        ..., 1:
    ],
    "rank 0: stage 0 failed.* one tensor of floating-point numbers, not a tuple": lambda x: (x, x),
    r"put out float64 \(1, 3, 6\), and float64 \(2, 3, 6\) before": lambda x: x[: 1 + int(x[0, 0, 0] > 0)],
}


def wrong_outputs() -> list[str]:
    (x, y), said = batch(4), []
    x[:, 0, 0] = 1
    turned = torch.where(torch.arange(4)[:, None, None] < 2, x, -x)  # the second micro-batch is another one
    for function in OUTPUTS.values():
        pipeline = pipeline_of(nn.Sequential(Does(function), nn.Linear(6, 6).double()), 2, cuts=[1])
        said.append(message_of(lambda p=pipeline: [p.step(each, y) for each in (x, turned)]))
    return said


def test_outputs_that_do_not_fit_the_next_stage():
    first, second = run_ranks(2, wrong_outputs)
    assert first == second
    for expected, message in zip(OUTPUTS, first, strict=True):
        assert re.search(expected, message), message


def test_a_decoder_whose_blocks_need_a_mask():
    pytest.importorskip("transformers")
    from scratch_ddp.benchmark.steps import build_llama

    model = build_llama(num_hidden_layers=1, hidden_size=12, intermediate_size=8, vocab_size=8)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="load it with attn_implementation='sdpa'"):
        layers_of(model)
