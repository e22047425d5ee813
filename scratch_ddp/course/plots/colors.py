"""The colours that stand for the same thing in every picture."""

RANK_COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#76b7b2", "#edc948", "#e15759", "#9c755f")
SUM_COLOR = "#3b3b3b"  # what all ranks have contributed to
SENT_COLOR = "#d4001a"  # what travels, and how much of it
QUIET = "#c8c8c8"  # lines and frames that only hold the picture together


def rank_color(rank: int) -> str:
    """The colour of a rank; the eight colours come round again from rank 8 on."""
    return RANK_COLORS[rank % len(RANK_COLORS)]
