"""The benchmark of the sharded optimizer judges what it measures."""

import torch._dynamo  # noqa: F401  optimizers import it at first use: once here, not in every forked rank
from transformers import LlamaForCausalLM  # noqa: F401

from scratch_ddp.benchmark.zero import MAKERS, OURS, PLAIN, TORCHS, measure, shares, state_rows, step_rows
from scratch_ddp.instruments.timing import Sample
from tests.ranks import run_ranks

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_state_and_bits_of_real_ranks_hold():
    reports = run_ranks(3, shares, TINY)
    assert sum(mine for mine, *_ in reports) == reports[0][1]
    assert all(row.holds for row in state_rows(reports))


def test_a_lopsided_share_and_other_bits_do_not_hold():
    state, bits = state_rows([(90, 100, 30, True), (10, 100, 30, False)])
    assert not state.holds and "1.333 of it; 0.9000" in state.measured
    assert not bits.holds and bits.measured == "others"


def test_steps_are_judged_beside_torchs():
    samples = {OURS: [Sample(1.0, 1.2)] * 3, TORCHS: [Sample(1.0, 1.0)] * 3, PLAIN: [Sample(2.0, 2.0)] * 3}
    beside_torch, beside_plain = step_rows(samples)
    assert not beside_torch.holds and beside_torch.measured.startswith("1.2 ")
    assert beside_plain.holds and beside_plain.measured.startswith("0.6 ")


def test_every_optimizer_is_timed():
    samples = run_ranks(2, measure, 2, TINY)[0]
    assert samples.keys() == MAKERS.keys() and all(len(each) == 2 for each in samples.values())
