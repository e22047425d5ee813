"""The benchmark of layouts: what it says of steps that are as forecast, and of others; the published table."""

from scratch_ddp.benchmark import plan
from scratch_ddp.benchmark.plan import layouts
from scratch_ddp.course.pages.split_model import BATCH, forecast


def test_layouts_have_one_batch_and_differ():
    for devices in (2, 4, 8):
        found = layouts(devices)
        assert len(set(found)) == len(found) and {each.devices for each in found} == {devices}
        assert {each.batch for each in found} == {BATCH}


def test_steps_as_forecast_hold():
    exact = {layout: forecast(layout) for layout in layouts(4)}
    assert all(row.holds for row in plan.judge({layout: 1.02 * seconds for layout, seconds in exact.items()}))
    order, error = plan.judge({layout: 1.2 * seconds for layout, seconds in exact.items()})
    assert order.holds and not error.holds and error.measured.startswith("16.7%")
    order, _ = plan.judge({layout: 1 / seconds for layout, seconds in exact.items()})
    assert not order.holds


def test_the_published_table():
    table = plan.published_table()
    layout = "dp 24 × tp 8 × pp 8, DDP, 96 micro-batches of 1 in 2 chunks a rank, checkpointing"
    assert f"| GPT 145.6B | {layout} | 148 | 147 | -1% | 38 |" in table and "44% of the peak" in table
