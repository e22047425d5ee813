"""The benchmark of strategies: all of them are timed, and judged by CPU seconds."""

import torch._dynamo  # noqa: F401  imported at first use: once here, not in every forked rank
from transformers import LlamaForCausalLM  # noqa: F401  as above

from scratch_ddp.benchmark.ddp import BEST, OURS, REFERENCE, WRAPPERS, measure, rows
from scratch_ddp.benchmark.steps import VOCABULARY, build_llama, make_batch, times_table
from scratch_ddp.instruments.timing import Sample
from tests.ranks import run_ranks

TINY = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1}


def test_every_strategy_is_timed():
    first, second = run_ranks(2, measure, 2, TINY | {"num_hidden_layers": 1})
    assert first == second and list(first) == list(WRAPPERS)
    assert all(
        len(samples) == 2 and all(each.cpu > 0 and each.wall > 0 for each in samples) for samples in first.values()
    )
    assert len(times_table(first, REFERENCE).splitlines()) == 2 + len(WRAPPERS)


def test_cpu_seconds_are_judged():
    samples = {REFERENCE: [Sample(1, 1)] * 3, BEST: [Sample(1, 0.9)] * 3}
    for ours, holds in ((0.96, [True, True]), (0.98, [True, False]), (1.01, [False, False])):
        judged = rows(samples | {OURS: [Sample(wall=5, cpu=ours)] * 3})
        assert [row.holds for row in judged] == holds


def test_the_model_is_the_same_on_every_rank_and_the_batches_are_not():
    one, other = build_llama(**TINY), build_llama(**TINY)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(make_batch(0)["input_ids"], make_batch(1)["input_ids"])
    assert make_batch(0)["input_ids"].shape == (4, 32) and make_batch(0)["input_ids"].max() < VOCABULARY
    with torch.device("meta"):
        whole = build_llama()
    parameters = list(whole.parameters())
    assert len(parameters) == 57 and sum(each.numel() for each in parameters) == 15_733_632
