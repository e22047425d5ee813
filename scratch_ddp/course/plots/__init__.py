"""Pictures of what the ranks held, computed and sent, drawn from recorded data.

There is one module per kind of picture. Every function returns a matplotlib Figure.
"""

from scratch_ddp.common.extras import extra

with extra("cells"):
    import matplotlib  # noqa: F401

from scratch_ddp.course.plots.bounds import bound_map, bound_sliders
from scratch_ddp.course.plots.curves import losses_and_residuals, step_curves
from scratch_ddp.course.plots.memory.bars import memory_bars
from scratch_ddp.course.plots.memory.curves import memory_curves
from scratch_ddp.course.plots.memory.strips import memory_strips
from scratch_ddp.course.plots.ranks.attention_map import attention_map
from scratch_ddp.course.plots.ranks.disagreement import disagreement_saw
from scratch_ddp.course.plots.ranks.expert_load import expert_load
from scratch_ddp.course.plots.ranks.gradients import gradient_arrows
from scratch_ddp.course.plots.ranks.holdings import holdings_atlas
from scratch_ddp.course.plots.ranks.host_traffic import HostTraffic, host_traffic
from scratch_ddp.course.plots.ranks.messages import message_ladder
from scratch_ddp.course.plots.ranks.rings import Frame, ring_frames
from scratch_ddp.course.plots.ranks.slices import Station, cut_products, slice_layouts
from scratch_ddp.course.plots.time.bandwidth import bandwidth_chart, time_chart
from scratch_ddp.course.plots.time.breakdown import breakdown_chart
from scratch_ddp.course.plots.time.bucket_sweep import Sweep, bucket_sweep
from scratch_ddp.course.plots.time.forecasts import forecast_curve, forecast_diagonal
from scratch_ddp.course.plots.time.interruptions import attempts, resumed_losses, saving_curve, steps_over_time
from scratch_ddp.course.plots.time.schedules import schedule_chart
from scratch_ddp.course.plots.time.timeline import timeline_chart
from scratch_ddp.course.plots.time.ways_on_links import ways_on_links

__all__ = [
    "attempts",
    "attention_map",
    "bandwidth_chart",
    "breakdown_chart",
    "bound_map",
    "bound_sliders",
    "bucket_sweep",
    "cut_products",
    "disagreement_saw",
    "expert_load",
    "forecast_curve",
    "forecast_diagonal",
    "Frame",
    "gradient_arrows",
    "holdings_atlas",
    "host_traffic",
    "HostTraffic",
    "losses_and_residuals",
    "memory_bars",
    "memory_curves",
    "memory_strips",
    "message_ladder",
    "resumed_losses",
    "ring_frames",
    "saving_curve",
    "slice_layouts",
    "Station",
    "schedule_chart",
    "step_curves",
    "steps_over_time",
    "Sweep",
    "time_chart",
    "timeline_chart",
    "ways_on_links",
]
