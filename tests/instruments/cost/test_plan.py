"""Layouts by formula: memory, time and bounds, held against published figures; the plan; the command."""

from dataclasses import replace

import pytest

from scratch_ddp.instruments.cost import CLUSTERS, MODELS, Layout, Link, bytes_per_token, flops_per_token, pipelined
from scratch_ddp.instruments.cost.__main__ import main
from scratch_ddp.instruments.cost.layouts import EFFICIENCIES, blocks_of_stages, rank_memory, step_time
from scratch_ddp.instruments.cost.plan import layouts, plan, what_binds
from scratch_ddp.instruments.cost.published import GPT_3, GPT_3_SHARDED, LLAMA_3, MEGATRON, TORCHTITAN
from scratch_ddp.instruments.cost.states import WIDE_GRADIENTS
from scratch_ddp.pipeline import interleaved, one_f_one_b

XXL, LLAMA, H100 = MODELS["XXL"], MODELS["Llama-3-8B"], CLUSTERS["H100"]


def test_what_binds():
    """By devices, sequences of a step, and tp."""
    cases = {(8, 64, 1): "memory", (8, 4, 1): "too few sequences", (1024, 1024, 1): "FSDP's messages"}
    cases |= {(8, 64, 64): "memory", (1024, 4096, 1): "compute", (1024, 4096, 64): "tensor parallel's messages"}
    for (devices, batch, tp), binds in cases.items():
        assert what_binds(XXL, H100, devices, batch, 2048, tp, checkpointing=True) == binds


def test_published_runs():
    """Times: large models within 11 %, all but ZeRO-3 of 2021 within the range. Memory: torchtitan's, Llama's 80 GB."""
    for run in (*MEGATRON[2:], *GPT_3, *LLAMA_3):
        assert run.forecast() == pytest.approx(run.tflops, rel=0.11), run.shape.name
    for run in (*MEGATRON, *GPT_3, GPT_3_SHARDED[0], *LLAMA_3, *TORCHTITAN):
        slow, quick = map(run.forecast, EFFICIENCIES)
        assert slow <= run.tflops <= quick, (run.shape.name, run.layout, slow, run.tflops, quick)
    for run in (*LLAMA_3, *TORCHTITAN):
        held = rank_memory(run.shape, run.layout, 8192, run.precision).total
        assert held == pytest.approx(run.held, rel=0.05) if run.held else 0.9 * 80e9 < held < 80e9
    assert all(0.66 < run.tflops / run.forecast() < 0.79 for run in TORCHTITAN)


def test_a_pipeline_has_no_more_micro_batches_under_way_than_there_are():
    shape = MODELS["Llama-3-405B"]
    of_one = 8192 * bytes_per_token(shape, tp=8)
    held = {m: rank_memory(shape, Layout(1, 8, 16, 1, m, chunks=4), 8192).activations / of_one for m in (16, 32)}
    assert held[16] == pytest.approx(8 * 16) and held[32] == pytest.approx(8 * 19.25)
    assert blocks_of_stages(126, 16) == [7, *[8] * 14, 7]


def test_a_step_of_a_pipeline_is_that_of_the_simulated_schedule():
    shape = replace(LLAMA, vocabulary=0)  # equal stages
    for p, m in ((2, 1), (2, 8), (4, 2), (4, 4), (4, 16), (8, 8), (8, 32)):
        for hop in (0.1, 1.0, 10.0):  # in forwards of a stage
            forward = step_time(shape, Layout(pp=p, micro_batches=m), H100, 4096).compute / m / 3
            far = replace(H100, per_node=1, between=Link(hop * forward, 0))
            whole = pipelined(one_f_one_b(p, m), forward, 2 * forward, 0, far.between.wire(2))
            time = step_time(shape, Layout(pp=p, micro_batches=m), far, 4096)
            assert time.total == pytest.approx(whole, rel=0.04), (p, m, hop)
    time = step_time(LLAMA, Layout(tp=8, pp=4, micro_batches=16, chunks=2), H100, 4096)
    pair = (time.compute + time.tensor) / 16  # forward and backward of a micro-batch on a rank
    hop = H100.wire(2, 8).message(2 * 4096 * 4096 / 8)
    whole = pipelined(interleaved(4, 16, 2), pair / 6, pair / 3, 0, Link(hop, 0).wire(2))
    assert time.total == pytest.approx(whole, 0.01)


def test_parts_of_a_step():
    def step(*args, **layout):
        return step_time(LLAMA, Layout(*args, **layout), H100, 4096)

    alone = step(micro_batches=8)
    assert alone.total == alone.compute == pytest.approx(flops_per_token(LLAMA, 4096) * 8 * 4096 / 0.55 / 989e12, 1e-3)
    assert step(tp=16, micro_batches=8).tensor > step(tp=8, micro_batches=8).tensor > 0
    cut, chunks = step(pp=4, micro_batches=4), step(pp=4, micro_batches=4, chunks=2)
    assert cut.bubble == pytest.approx(3 / 4 * cut.compute, rel=0.01)
    assert chunks.bubble == cut.bubble / 2 and chunks.pipeline > cut.pipeline
    assert 1.3 < step(micro_batches=8, checkpointing=True).compute / alone.compute < 4 / 3
    assert 1.01 < step(micro_batches=8, checkpointing="selective").compute / alone.compute < 1.02
    assert 1.09 < step(micro_batches=8, checkpointing="half").compute / alone.compute < 1.12
    # With several micro-batches ZeRO-1 reduces once, ZeRO-2 and ZeRO-3 each time.
    data = {stage: step(64, micro_batches=8, stage=stage).data for stage in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")}
    assert data["DDP"] < data["ZeRO-1"] < data["ZeRO-2"] and data["ZeRO-3"] > 0
    wide = step_time(LLAMA, Layout(64), H100, 4096, precision=WIDE_GRADIENTS).data
    assert wide == pytest.approx(2 * data["DDP"], rel=0.02)
    # HSDP gathers in a node alone, and sums shards between nodes.
    node, whole = (step(dp, stage="ZeRO-3").data for dp in (8, 1024))
    assert node < step(1024, shards=8, stage="ZeRO-3").data < whole


def test_what_a_plan_tries():
    """tp divides a node and the heads of keys and values: 6 of 8 GPUs would leave them, and 16 heads' parts cross."""
    for shape, devices in ((LLAMA, 48), (replace(LLAMA, kv_heads=4), 16), (XXL, 64)):
        tried = [each for each in layouts(shape, H100, devices, 96) if isinstance(each, Layout)]
        assert all(8 % each.tp == 0 and (shape.kv_heads or shape.inner) % each.tp == 0 for each in tried)
        assert {each.devices for each in tried} == {devices} and {each.batch for each in tried} == {96}
        assert {1, 2, 4, 8} <= {each.chunks for each in tried} and {0, 4} <= {each.shards for each in tried}
        assert {False, True, "selective", "half"} == {each.checkpointing for each in tried}
    assert LLAMA_3[0].layout in layouts(MODELS["Llama-3-405B"], H100, 8192, 2048)


def test_a_plan_is_the_best_of_what_fits():
    found = plan(LLAMA, H100, 64, 64, 4096)
    first, quicker = found.best[0], Layout(64, stage="DDP")
    assert all(each.memory.total <= 0.9 * 80e9 for each in found.best)
    assert min(each.seconds for each in found.best) > first.seconds / 1.01 and first.time.total < first.slow.total
    assert "too large for the memory" in found.table() and found.table(most=1).count("binds") == 1
    # 8 µs are no reason to take 57 GB in place of 19.
    assert first.layout.stage != "DDP" and first.memory.total < 0.7 * rank_memory(LLAMA, quicker, 4096).total
    assert step_time(LLAMA, quicker, H100, 4096).total > 0.99 * step_time(LLAMA, first.layout, H100, 4096).total


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: plan(XXL, H100, 8, 0, 128), "a layout's numbers are 1 or more"),
        (lambda: step_time(MODELS["Mixtral-8x7B"], Layout(), H100, 128), "is a mixture of experts"),
        (lambda: rank_memory(XXL, Layout(pp=127), 128), "126 blocks can't be cut into 127 stages"),
        (lambda: Layout(pp=2, stage="ZeRO-3"), "ZeRO-3 with a pipeline"),
        (lambda: Layout(pp=4, micro_batches=6, chunks=2), "an interleaved pipeline needs two stages or more"),
        (lambda: Layout(8, shards=3, stage="ZeRO-3"), "3 shards don't fit dp 8"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


@pytest.mark.parametrize(
    "options, status, says",
    [
        ("--model Llama-3-8B --gpus 16 --batch 64", 0, "% of the peak; at worst "),
        ("--model XXL --gpus 8 --batch 8", 1, "GB more than the 72.0 GB that may be used"),
        ("--model Mixtral-8x7B --gpus 8", 1, "12,879,925,248 active"),
        ("--model nothing --gpus 8", 2, "there is no file 'nothing'"),
    ],
)
def test_the_command_line(options, status, says, capsys):
    try:
        ended = main(options.split())
    except SystemExit as refused:
        ended = refused.code
    assert ended == status and says in "".join(capsys.readouterr())
