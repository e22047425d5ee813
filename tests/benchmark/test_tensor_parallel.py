"""The benchmark of tensor parallelism: every variant computes the same loss and is timed; CPU seconds are judged."""

import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
from transformers import LlamaForCausalLM  # noqa: F401  as above

from scratch_ddp.benchmark.tensor_parallel import MODELS, MUST, measure, rows
from scratch_ddp.instruments.timing import Sample
from tests.ranks import run_ranks

TINY = {
    "Llama": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
    "own model": {"vocabulary": 64, "width": 32, "hidden": 48, "head_dim": 8},
}


def test_every_variant_is_timed():
    first, second = run_ranks(2, measure, 2, TINY)
    assert first == second and len(first) == 5 * len(MODELS)
    assert all(len(samples) == 2 for samples in first.values()) and {name for pair in MUST for name in pair} <= set(
        first
    )


def test_cpu_seconds_are_judged():
    samples = {torchs: [Sample(1, 1)] * 3 for _, torchs in MUST}
    for cpu, holds in ((0.79, [True] * 5), (0.85, [False, False, True, False, True]), (0.95, [False] * 5)):
        judged = rows(samples | {ours: [Sample(wall=5, cpu=cpu)] * 3 for ours, _ in MUST})
        assert [row.holds for row in judged] == holds
