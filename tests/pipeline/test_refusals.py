"""What can't be done is refused in a sentence, on every rank alike, and the ranks can go on afterwards."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from scratch_ddp.instruments.traffic import traffic
from scratch_ddp.pipeline import Action, Pipeline, gpipe, one_f_one_b
from scratch_ddp.pipeline.split import layers_of
from tests.ddp.cases import Made
from tests.pipeline.cases import alone, batch, build, distance, pipeline_of
from tests.ranks import assert_refused, in_turn, message_of, run_ranks


class Scaled(nn.Sequential):
    def forward(self, x):
        return 2 * super().forward(x)


DIFFERENT = "the ranks build different pipelines; do the same everywhere\nrank 1: "
ONE_LESS = [[each for each in row if each != Action("B", 1, 2)] for row in one_f_one_b(2, 4)]
NOT_BUILT = [  # what both ranks say, and what rank 1 passes
    ("rank 1: n_micro is a number of micro-batches, 1 or more, not 0", {"n_micro": 0}),
    ("'gpipe', '1f1b', 'interleaved', 'zb_h1' or rows, not '2f2b'", {"schedule": "2f2b"}),
    ("rank 1: the schedule has 3 rows, but there are 2 ranks", {"schedule": gpipe(3, 4)}),
    ("rank 1: B2 of stage 1 is missing", {"schedule": ONE_LESS}),
    ("rank 1: 1 layers can't be cut into 2 stages: use fewer ranks or fewer stages", {"layers": build(1)}),
    ("rank 1: TypeError: a Bilinear can't be cut, only an nn.Sequential", {"layers": nn.Bilinear(2, 2, 2)}),
    ("rank 1: TypeError: a Scaled can't be cut", {"layers": Scaled(*build(4))}),
    ("cuts must be 1 growing numbers from 1 to 3, not [4]", {"cuts": [4]}),
    *(
        (DIFFERENT, settings)
        for settings in ({"layers": build(5)}, {"n_micro": 5}, {"schedule": "gpipe"}, {"cuts": [1]})
    ),
]


def built(settings: dict):
    return lambda: Pipeline(**{"layers": build(4), "n_micro": 4} | (settings if dist.get_rank() else {}))


def test_what_can_not_be_built():
    assert_refused(2, [(says, built(settings)) for says, settings in NOT_BUILT])


def no_batch() -> None:
    pipeline, (x, y), rank = pipeline_of(build(4), 4), batch(8), dist.get_rank()
    for says, call in (
        ("rank 0: x must be a tensor of at least 4 items", lambda: pipeline.step(x[:3], y)),
        ("x has 8 items and y 7", lambda: pipeline.step(x, y[:7])),
        ("rank 0: x must be a tensor of at least 4 items", lambda: pipeline.step(None, y)),
        ("rank 1: y must be a tensor", lambda: pipeline.step(x, torch.tensor(1.0))),
        ("some ranks call step() under no_grad", lambda: torch.set_grad_enabled(rank > 0)(pipeline.step)(x, y)),
    ):
        with traffic() as counted:
            said = message_of(call)
        assert said.startswith(says), said
        assert not counted.calls, "nothing is sent"
    pipeline = pipeline_of(build(4), 4, count=lambda target: target[0, 0, 0, 0])
    said = message_of(lambda: pipeline.step(x, y))
    assert said.startswith("rank 1: stage 1 failed in the forward of micro-batch 0: IndexError"), said


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


def failing(schedule: str, when: str, new_sizes: bool) -> None:
    healthy, breaks = build(8), Breaks(when)
    whole = nn.Sequential(*healthy[:4], nn.Sequential(breaks, healthy[4]), *healthy[5:])
    pipeline, (x, y) = Pipeline(whole, 4, schedule, mse_loss), batch(20)
    if not new_sizes:
        pipeline.step(x, y)
    breaks.arm()
    said = message_of(lambda: pipeline.step(x, y))
    stage, home = (4, 0) if schedule == "interleaved" else (2, 2)
    assert said.startswith(f"rank {home}: stage {stage}"), said
    assert f"in the {when} of micro-batch 1: RuntimeError: the stage is broken" in said, said
    assert all(each.grad is None for each in pipeline.parameters()), "half a step's gradients are dropped"
    whole = copy.deepcopy(whole)
    alone(whole, x, y)
    for _ in range(2):  # once with headers, once without
        pipeline.zero_grad()
        pipeline.step(x, y)
        assert distance(pipeline, whole) < 1e-12


def test_a_stage_that_fails():
    in_turn(
        4, failing, [("interleaved", "forward", True), ("interleaved", "backward", True), ("zb_h1", "forward", False)]
    )


OUTPUTS = [  # what every rank says, and a first stage
    (r"rank 1: stage 1 failed in the forward of micro-batch 0: .*shapes", lambda x: x[..., 1:]),
    ("rank 0: stage 0 failed.* one tensor of floating-point numbers with .* not tuple", lambda x: (x, x)),
    (r"put out float64 \(1, 3, 6\), and float64 \(2, 3, 6\) before", lambda x: x[: 1 + int(x[0, 0, 0] > 0)]),
]


def wrong_output(expected: str, function) -> None:
    x, y = batch(4)
    x[:, 0, 0] = 1
    turned = torch.where(torch.arange(4)[:, None, None] < 2, x, -x)  # the second micro-batch is another one
    pipeline = pipeline_of(nn.Sequential(Made(lambda _, x: function(x)), nn.Linear(6, 6).double()), 2, cuts=[1])
    said = message_of(lambda: [pipeline.step(each, y) for each in (x, turned)])
    assert re.search(expected, said), said


def test_outputs_that_do_not_fit_the_next_stage():
    in_turn(2, wrong_output, OUTPUTS)


def test_a_decoder_whose_blocks_need_a_mask():
    pytest.importorskip("transformers")
    from scratch_ddp.benchmark.steps import build_llama

    model = build_llama(num_hidden_layers=1, hidden_size=12, intermediate_size=8, vocab_size=8)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="load it with attn_implementation='sdpa'"):
        layers_of(model)
