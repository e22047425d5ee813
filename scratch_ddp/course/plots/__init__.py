"""Pictures of what the ranks held, computed and sent, drawn from recorded data.

Every function returns a matplotlib Figure. What they show is in the files' names: tensors, messages, time, and charts
(lines and bars). style.py has what all pictures share.
"""

from scratch_ddp.course.plots.charts import *  # noqa: F403
from scratch_ddp.course.plots.messages import *  # noqa: F403
from scratch_ddp.course.plots.tensors import *  # noqa: F403
from scratch_ddp.course.plots.time import *  # noqa: F403
