"""Pictures of what the ranks held, computed and sent, drawn from recorded data.

There is one module per kind of picture. Every function returns a matplotlib Figure.
"""

from scratch_ddp.common.extras import extra

with extra("cells"):
    import matplotlib  # noqa: F401

from scratch_ddp.course.plots.attention_map import attention_map
from scratch_ddp.course.plots.bandwidth import bandwidth_chart, time_chart
from scratch_ddp.course.plots.bound_map import bound_map
from scratch_ddp.course.plots.bound_sliders import bound_sliders
from scratch_ddp.course.plots.breakdown import breakdown_chart
from scratch_ddp.course.plots.bucket_sweep import Sweep, bucket_sweep
from scratch_ddp.course.plots.curves import losses_and_residuals, step_curves
from scratch_ddp.course.plots.disagreement import disagreement_saw
from scratch_ddp.course.plots.expert_load import expert_load
from scratch_ddp.course.plots.forecasts import forecast_curve, forecast_diagonal
from scratch_ddp.course.plots.gradients import gradient_arrows
from scratch_ddp.course.plots.holdings import holdings_atlas
from scratch_ddp.course.plots.memory_bars import memory_bars
from scratch_ddp.course.plots.memory_curves import memory_curves
from scratch_ddp.course.plots.memory_strip import memory_strips
from scratch_ddp.course.plots.messages import message_ladder
from scratch_ddp.course.plots.rings import Frame, ring_frames
from scratch_ddp.course.plots.schedules import schedule_chart
from scratch_ddp.course.plots.slices import Station, cut_products, slice_layouts
from scratch_ddp.course.plots.timeline import timeline_chart
from scratch_ddp.course.plots.ways_on_links import ways_on_links

__all__ = [
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
    "losses_and_residuals",
    "memory_bars",
    "memory_curves",
    "memory_strips",
    "message_ladder",
    "ring_frames",
    "slice_layouts",
    "Station",
    "schedule_chart",
    "step_curves",
    "Sweep",
    "time_chart",
    "timeline_chart",
    "ways_on_links",
]
