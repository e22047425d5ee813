"""Pictures of what the ranks held, computed and sent, drawn from recorded data.

Every function returns a matplotlib Figure. What they show is in the files' names: tensors, messages, time, lines (over
steps and seconds), costs (forecast and measured). style.py has what all pictures share.
"""

from scratch_ddp.common.extras import extra

with extra("cells"):
    import matplotlib  # noqa: F401

from scratch_ddp.course.plots.costs import (
    Sweep,
    bandwidth_chart,
    bound_map,
    bound_sliders,
    bucket_sweep,
    forecast_bars,
    forecast_curve,
    memory_bars,
    time_chart,
    ways_on_links,
)
from scratch_ddp.course.plots.lines import (
    attempts,
    disagreement_saw,
    losses_and_residuals,
    memory_curves,
    resumed_losses,
    saving_curve,
    step_curves,
    steps_over_time,
)
from scratch_ddp.course.plots.messages import HostTraffic, expert_load, host_traffic, message_ladder
from scratch_ddp.course.plots.tensors import (
    Frame,
    Station,
    attention_map,
    cut_products,
    gradient_arrows,
    holdings_atlas,
    memory_strips,
    ring_frames,
    saved_bars,
    slice_layouts,
)
from scratch_ddp.course.plots.time import breakdown_chart, schedule_chart, timeline_chart

__all__ = ["Frame", "HostTraffic", "Station", "Sweep", "attempts", "attention_map", "bandwidth_chart", "bound_map"]
__all__ += ["bound_sliders", "breakdown_chart", "bucket_sweep", "cut_products", "disagreement_saw", "expert_load"]
__all__ += ["forecast_curve", "forecast_bars", "gradient_arrows", "holdings_atlas", "host_traffic"]
__all__ += ["losses_and_residuals", "memory_bars", "memory_curves", "memory_strips", "message_ladder"]
__all__ += [
    "resumed_losses",
    "ring_frames",
    "saved_bars",
    "saving_curve",
    "schedule_chart",
    "slice_layouts",
    "step_curves",
]
__all__ += ["steps_over_time", "time_chart", "timeline_chart", "ways_on_links"]
