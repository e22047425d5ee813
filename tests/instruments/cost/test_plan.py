"""Layouts by formula: memory, time and bounds, held against published figures; the plan; bad input."""

from dataclasses import replace

import pytest
from scratch_ddp.benchmark.plan import rank_correlation

from scratch_ddp.course.lessons.lesson_15 import devices_needed
from scratch_ddp.instruments.cost import (
    CLUSTERS,
    MODELS,
    Layout,
    Wire,
    batch_trade,
    best_mesh,
    bytes_per_token,
    cluster,
    flops_per_token,
    operations_per_byte,
    pipelined,
    plan,
    rank_memory,
    step_time,
    tokens_to_be_compute_bound,
    training,
    utilisation,
    what_binds,
)
from scratch_ddp.instruments.cost.__main__ import main
from scratch_ddp.instruments.cost.layouts.forecast import hops, sharded_pass, tflops_of_device
from scratch_ddp.instruments.cost.layouts.layout import blocks_of_stages, parameters_of_rank
from scratch_ddp.instruments.cost.layouts.models import LLAMA_3, MEGATRON
from scratch_ddp.pipeline import interleaved, one_f_one_b

XXL, H100, V5P = MODELS["XXL"], CLUSTERS["H100"], CLUSTERS["TPU v5p"]


def test_the_figures_of_the_write_up_on_xxl():
    each = 4 * XXL.parameters  # master weights, or accumulated gradients, in float32
    assert round(each / 2**30) == 819 and round(each / 1e8) == 8794  # "~818 GB" are GiB
    assert -(-each // (80 * 10**9)) == 11  # of one of the two
    assert -(-2 * each // (80 * 10**9)) == 22  # of both; it says 11
    assert devices_needed(XXL.parameters, 80 * 10**9, 3, 0) == 44  # with Adam
    assert XXL.blocks * bytes_per_token(XXL) == 17_547_264  # it says 17,543,808
    one, n = 4096, 64
    held = rank_memory(XXL, Layout(n, stage="ZeRO-3"), one)
    assert held.activations == one * 17_547_264  # FSDP shards none of them; it divides all by n
    sliced = rank_memory(XXL, Layout(8, 8, stage="ZeRO-3"), one)
    assert sliced.activations == held.activations / 8
    assert held.weights == 2 * XXL.parameters / n  # the copies in bfloat16 that it leaves out


def test_the_batch_from_which_fsdp_is_compute_bound():
    assert operations_per_byte(V5P, 64) == pytest.approx(2550)  # "How to Scale Your Model", part 5
    assert best_mesh(4096, 30_000, 2550, 2, 1).tokens == pytest.approx(2550**2 / (2 * 30_000))  # its formula
    assert operations_per_byte(H100, 8) == pytest.approx(989e12 / 450e9)
    wire = replace(H100.wire(8), alpha=0.0, per_round=0.0)
    assert tokens_to_be_compute_bound(989e12, wire, 10**9) == pytest.approx(7 / 8 * 989e12 / 450e9, abs=1)
    alone = tokens_to_be_compute_bound(989e12, H100.wire(1024), XXL.block)
    with_tp = tokens_to_be_compute_bound(989e12, H100.wire(128, 8), XXL.block, tp=8) / 8
    assert 7.5 < alone / with_tp < 8.5
    assert best_mesh(4, 10, 1000).y == 1 and best_mesh(4, 10**6, 1).tokens == 0


@pytest.mark.parametrize(
    "devices, batch, options, binds",
    [
        (8, 64, {"checkpointing": True}, "memory"),
        (8, 4, {}, "too few sequences"),
        (1024, 4096, {"checkpointing": True}, "FSDP's messages"),
        (1024, 4096, {"tp": 8, "checkpointing": True}, "compute"),
        (1024, 4096, {"tp": 16, "checkpointing": True}, "tensor parallel's messages"),
    ],
)
def test_what_binds(devices, batch, options, binds):
    assert what_binds(XXL, H100, devices, batch, 2048, **options) == binds


def test_published_trainings():
    """Of the Megatron paper from 7.5 billion parameters on, within 10 %; of Llama 3 with chunks that are assumed."""
    for run in MEGATRON[2:]:
        found = tflops_of_device(run.shape, run.layout(), CLUSTERS[run.cluster], run.sequence)
        assert found == pytest.approx(run.tflops, rel=0.10), run.shape.name
    for run in LLAMA_3:
        found = tflops_of_device(run.shape, run.layout(chunks=4), CLUSTERS[run.cluster], run.sequence)
        assert found == pytest.approx(run.tflops, rel=0.07)
    flops = flops_per_token(MODELS["DeepSeek-V3"], 4096) * 1e12
    assert training(flops, 2048, 989e12, 1.0).device_hours / 180_000 == pytest.approx(0.42, abs=0.01)


def test_time_and_money():
    whole = training(3.6e18, 10, 1e12, 0.5, 2.0)
    assert (whole.seconds, whole.device_hours, whole.money) == (720_000, 2000, 4000)
    assert utilisation(6e9, 1000, 6, 2e12) == 0.5
    assert batch_trade(1, 1) == (2, 2) and batch_trade(3, 1) == (1 + 1 / 3, 4)


def test_hops_are_those_of_the_simulated_schedule():
    for p, m in ((2, 1), (2, 8), (3, 10), (4, 2), (4, 4), (4, 16), (8, 8), (8, 32)):
        for hop in (0.1, 1.0, 10.0):
            whole = pipelined(one_f_one_b(p, m), 1, 2, 0, Wire(hop, 0, 2))
            assert 3 * (m + p - 1) + hops(p, m, hop) == pytest.approx(whole, rel=0.04), (p, m, hop)


def test_messages_of_an_interleaved_pipeline():
    where = {"cluster": H100, "sequence": 4096}
    time = step_time(MODELS["Llama-3-8B"], Layout(tp=8, pp=4, micro_batches=16, chunks=2), **where)
    pair = (time.compute + time.tensor) / 16  # forward and backward of a micro-batch on a rank
    hop = H100.wire(2, 8).message(2 * 4096 * 4096 / 8)
    assert time.total == pytest.approx(pipelined(interleaved(4, 16, 2), pair / 6, pair / 3, 0, Wire(hop, 0, 2)), 0.01)


def test_a_sharded_pass():
    assert sharded_pass(4, 4, 8, 0) == 12
    assert sharded_pass(4, 4, 8, 0.5) == 12 + 0.5 + 0.5  # the first gather, the last scatter
    assert sharded_pass(4, 0, 0, 1) == 4 + 3 + 4  # all gathers, again without the last block's, all scatters
    assert sharded_pass(1, 1, 2, 1) == 5


def test_stages():
    assert blocks_of_stages(126, 16) == [7, *[8] * 14, 7] and blocks_of_stages(3, 2) == [2, 1]
    shape = MODELS["GPT-2"]
    ends = parameters_of_rank(shape, Layout(pp=12), 0), parameters_of_rank(shape, Layout(pp=12), 11)
    assert sum(ends) + 10 * shape.block == shape.parameters + shape.head  # a tied matrix is on both ends
    assert parameters_of_rank(shape, Layout(), 0) == shape.parameters


def test_parts_of_a_step():
    shape, where = MODELS["Llama-3-8B"], {"cluster": H100, "sequence": 4096}
    alone = step_time(shape, Layout(micro_batches=8), **where)
    assert alone.total == alone.compute == pytest.approx(flops_per_token(shape, 4096) * 8 * 4096 / (0.6 * 989e12), 1e-3)
    assert step_time(shape, Layout(tp=8, micro_batches=8), **where).tensor > 0
    far = step_time(shape, Layout(tp=16, micro_batches=8), **where)
    assert far.binds == "tensor" and far.tensor > 5 * step_time(shape, Layout(tp=8, micro_batches=8), **where).tensor
    cut = step_time(shape, Layout(pp=4, micro_batches=4), **where)
    assert cut.bubble == pytest.approx(3 / 4 * cut.compute, rel=0.01)
    chunks = step_time(shape, Layout(pp=4, micro_batches=4, chunks=2), **where)
    assert chunks.bubble == cut.bubble / 2 and chunks.pipeline > cut.pipeline
    data = [step_time(shape, Layout(64, stage=stage), **where).data for stage in ("DDP", "ZeRO-1", "ZeRO-3")]
    assert data[0] < data[1] and all(data)
    again = step_time(shape, Layout(micro_batches=8, checkpointing=True), **where)
    assert 1.3 < again.compute / alone.compute < 4 / 3


def test_a_plan_is_the_best_of_what_fits():
    found = plan(MODELS["Llama-3-8B"], H100, 16, 64, 4096)
    assert found.best and all(each.memory.total <= found.room for each in found.best)
    assert [each.time.total for each in found.best] == sorted(each.time.total for each in found.best)
    splits = [(each.layout.dp, each.layout.tp, each.layout.pp) for each in found.best]
    assert len(set(splits)) == len(splits) and all(each.layout.devices == 16 for each in found.best)
    assert all(each.layout.batch == 64 for each in found.best)
    assert "too large for the memory" in found.table() and found.table(most=1).count("binds") == 1
    more = plan(MODELS["Llama-3-8B"], H100, 16, 64, 4096, usable=0.3).best
    assert not more or more[0].time.total >= found.best[0].time.total


def test_a_model_that_fits_nowhere_says_by_how_much():
    found = plan(MODELS["Llama-3-405B"], H100, 8, 8, 4096)
    layout, memory = found.closest
    over = (memory.total - found.room) / 1e9
    assert not found.best and f"{over:.1f} GB more than the 72.0 GB" in found.table()
    assert "fits into no layout of 8 H100" in found.why_none()


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: plan(XXL, H100, 0, 8, 128), "devices must be a whole number, 1 or more, not 0"),
        (lambda: plan(XXL, H100, 8, -8, 128), "batch must be a whole number, 1 or more, not -8"),
        (lambda: plan(XXL, H100, 8, 8, 0), "sequence must be a whole number"),
        (lambda: plan(XXL, H100, 8, 8, 128, usable=1.5), "usable must be above 0 and at most 1"),
        (lambda: plan(MODELS["Mixtral-8x7B"], H100, 8, 8, 128), "is a mixture of experts: its layouts can't"),
        (lambda: step_time(XXL, Layout(), H100, 128, 0), "efficiency must be above 0 and at most 1, not 0"),
        (lambda: step_time(XXL, Layout(), H100, 0), "a sequence must have 1 token or more, not 0"),
        (lambda: rank_memory(XXL, Layout(pp=127), 128), "126 blocks can't be cut into 127 stages"),
        (lambda: Layout(dp=0), "dp must be a whole number, 1 or more, not 0"),
        (lambda: Layout(micro=-1), "micro must be a whole number, 1 or more, not -1"),
        (lambda: Layout(stage="zero"), "stage: 'zero'; allowed are DDP, ZeRO-1"),
        (lambda: Layout(pp=2, stage="ZeRO-3"), "ZeRO-3 with a pipeline"),
        (lambda: Layout(pp=4, micro_batches=6, chunks=2), "an interleaved pipeline needs two stages or more"),
        (lambda: what_binds(XXL, H100, 10, 8, 128, tp=8), "10 devices can't be shared by replicas of 8"),
        (lambda: tokens_to_be_compute_bound(0, H100.wire(8), 1), "flops, weights and tp must be more than 0"),
        (lambda: best_mesh(0, 1, 1), "at least 1 device, not 0"),
        (lambda: training(1, 0, 1, 0.5), "at least 1 device, not 0"),
        (lambda: training(1, 1, 1, 0), "utilisation must be above 0 and at most 1, not 0"),
        (lambda: utilisation(1, 1, 0, 1), "at least 1 device, not 0"),
        (lambda: batch_trade(-1, 1), "batches must be more than 0 tokens, not -1 and 1"),
        (lambda: cluster("Cray-1"), "there is no cluster of 'Cray-1'; there are A100 HDR"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


@pytest.mark.parametrize(
    "options, status, says",
    [
        ("--model Llama-3-8B --gpus 16 --batch 64", 0, "of the peak (with efficiency 0.6)"),
        ("--model XXL --gpus 8 --batch 8", 1, "XXL fits into no layout of 8 H100"),
        ("--model Mixtral-8x7B --gpus 8", 0, "46,702,792,704 parameters, 12,879,925,248 active"),
        ("--model nothing --gpus 8", 2, "there is no model 'nothing', and no such file"),
        ("--model XXL --gpus 0", 2, "--gpus must be 1 or more, not 0"),
        ("--model XXL --gpus 8 --batch -8", 2, "batch must be a whole number, 1 or more, not -8"),
        ("--model XXL --gpus 8 --gpu abacus", 2, "there is no cluster of 'abacus'"),
    ],
)
def test_the_command_line(options, status, says, capsys):
    assert main(options.split()) == status
    printed = capsys.readouterr()
    assert says in (printed.err if status == 2 else printed.out) and "Traceback" not in printed.err


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 20, 90]) == 1 and rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == 0.8
