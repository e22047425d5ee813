"""Pictures of what the ranks hold and send, drawn from what they really held and sent.

One module for each kind of picture; every function returns a matplotlib Figure.
"""

from scratch_ddp.plots.bandwidth import bandwidth_chart, time_chart
from scratch_ddp.plots.bucket_sweep import Sweep, bucket_sweep
from scratch_ddp.plots.curves import step_curves
from scratch_ddp.plots.disagreement import disagreement_saw
from scratch_ddp.plots.gradients import gradient_arrows
from scratch_ddp.plots.holdings import holdings_atlas
from scratch_ddp.plots.memory_curves import memory_curves
from scratch_ddp.plots.memory_strip import memory_strips
from scratch_ddp.plots.messages import message_ladder
from scratch_ddp.plots.residuals import losses_and_residuals
from scratch_ddp.plots.rings import Frame, ring_frames
from scratch_ddp.plots.timeline import timeline_chart

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
    "step_curves",
    "Sweep",
    "time_chart",
    "timeline_chart",
]
