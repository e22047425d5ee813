"""The benchmark of pipelines: every schedule and torch's are timed; times, bubble and activations are judged."""

import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
import torch.distributed.pipelining  # noqa: F401  as above
from transformers import LlamaForCausalLM  # noqa: F401  as above

from scratch_ddp.benchmark.pipeline import TORCHS, _sleeping, measure, step_rows
from scratch_ddp.instruments.timing import Sample
from scratch_ddp.pipeline import bubble, interleaved, one_f_one_b, simulate
from tests.ranks import run_ranks

TINY = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1}


def test_every_schedule_is_timed_beside_torchs():
    first, second = run_ranks(2, measure, 1, TINY | {"num_hidden_layers": 4})
    assert first == second
    assert set(first) == {*TORCHS, *(each[0] for each in TORCHS.values())}
    assert all(each.cpu > 0 and each.wall > 0 for samples in first.values() for each in samples)


def test_cpu_seconds_are_judged():
    torchs = {each[0]: [Sample(1, 1)] * 3 for each in TORCHS.values()}
    for cpu, holds in ((1.0, [True] * 4), (1.06, [True, True, False, True]), (1.1, [False, False, False, True])):
        ours = {name: [Sample(wall=5, cpu=cpu)] * 3 for name in TORCHS}
        assert [row.holds for row in step_rows(ours | torchs)] == holds


def test_sleeping_stages_are_judged():
    for rows, most in ((one_f_one_b(4, 8), 1.03), (interleaved(4, 8, 2), 1.05)):
        spans = simulate(rows)
        seconds, share, held = spans[0][-1][2], bubble(spans), [4, 3, 2, 1] if most == 1.03 else [11, 9, 7, 5]

        def judged(factor, more, alive, rows=rows, spans=spans, seconds=seconds, share=share):
            return [row.holds for row in _sleeping("x", rows, spans, [factor * seconds], [share + more], alive)]

        assert judged(most, 0.01, held) == [True, True, True]
        assert judged(most + 0.01, 0.03, held[::-1]) == [False, False, False]
