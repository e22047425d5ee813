"""Pictures of what the ranks held, computed and sent, drawn from recorded data.

There is one module per kind of picture. Every function returns a matplotlib Figure.
"""

from scratch_ddp.common.extras import extra

with extra("cells"):
    import matplotlib  # noqa: F401

from scratch_ddp.course.plots.bandwidth import bandwidth_chart, time_chart
from scratch_ddp.course.plots.bucket_sweep import Sweep, bucket_sweep
from scratch_ddp.course.plots.curves import losses_and_residuals, step_curves
from scratch_ddp.course.plots.disagreement import disagreement_saw
from scratch_ddp.course.plots.gradients import gradient_arrows
from scratch_ddp.course.plots.holdings import holdings_atlas
from scratch_ddp.course.plots.memory_curves import memory_curves
from scratch_ddp.course.plots.memory_strip import memory_strips
from scratch_ddp.course.plots.messages import message_ladder
from scratch_ddp.course.plots.rings import Frame, ring_frames
from scratch_ddp.course.plots.schedules import schedule_chart
from scratch_ddp.course.plots.timeline import timeline_chart

__all__ = [
    "bandwidth_chart",
    "bucket_sweep",
    "disagreement_saw",
    "Frame",
    "gradient_arrows",
    "holdings_atlas",
    "losses_and_residuals",
    "memory_curves",
    "memory_strips",
    "message_ladder",
    "ring_frames",
    "schedule_chart",
    "step_curves",
    "Sweep",
    "time_chart",
    "timeline_chart",
]
