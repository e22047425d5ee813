"""What all pictures share: colours that mean the same thing everywhere, and quiet frames."""

from matplotlib.axes import Axes

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
SUM_COLOR = "#3b3b3b"  # what all ranks have contributed to
SENT_COLOR = "#d4001a"  # what is sent, and how much of it
QUIET = "#c8c8c8"  # frames, grids and other lines in the background
GREY = "#666666"  # secondary text


def rank_color(rank: int) -> str:
    """The colour of a rank. There are eight; rank 8 has that of rank 0 again."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def draw_quiet_frame(panel: Axes) -> None:
    """Draw the panel's whole frame in light grey, with small labels."""
    panel.tick_params(labelsize=8)
    panel.spines[:].set_color(QUIET)


def draw_quiet_axes(panel: Axes, tick_length: float = 2) -> None:
    """Draw the left and bottom axes alone, in light grey, with short ticks."""
    draw_quiet_frame(panel)
    panel.tick_params(length=tick_length, color=QUIET)
    panel.spines[["top", "right"]].set_visible(False)
