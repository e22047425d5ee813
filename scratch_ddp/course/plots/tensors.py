"""What ranks hold and compute, number by number."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from scratch_ddp.course.plots import style
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, SUM_COLOR, draw_box, rank_color, write
from scratch_ddp.instruments.memory import Held, Moment


def holdings_atlas(seen: Mapping[str, Sequence[tuple[Sequence, Sequence]]]) -> Figure:
    """A panel per collective: what every rank held before and after.

    `seen[name][rank]` is (before, after), each with at most n entries for n ranks. A number from 10·r to 10·r+9 has the
    colour of rank r, a larger number (a sum) is dark, "?" (undefined) is grey, None or a missing entry is empty.
    """
    n = len(next(iter(seen.values())))
    rows = -(-len(seen) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(12.4, (0.42 * n + 0.5) * rows), layout="tight")
    for panel in axes.flat:
        panel.axis("off")
    for panel, (name, ranks) in zip(axes.flat, seen.items(), strict=False):
        panel.set_title(name, fontsize=11, loc="left", family="monospace")
        panel.set(xlim=(-1.7, 2 * n + 1.7), ylim=(-0.1, n))
        for rank, (before, after) in enumerate(ranks):
            y = n - 1 - rank
            write(panel, -0.2, y + 0.4, f"rank {rank}", "#777", size=7, ha="right")
            panel.annotate("", (n + 1.3, y + 0.4), (n + 0.3, y + 0.4), arrowprops={"arrowstyle": "->", "color": "#999"})
            for left, slots in ((0, before), (n + 1.6, after)):
                for place, value in enumerate([*slots, *[None] * (n - len(slots))]):
                    _draw_slot(panel, left + place, y, value, n)
    return figure


def _draw_slot(panel: Axes, x: float, y: float, value: float | str | None, n: int) -> None:
    text, color = value or "", "#dddddd" if value else "white"
    if isinstance(value, (int, float)):
        text, color = f"{value:g}", rank_color(int(value) // 10) if value < 10 * n else SUM_COLOR
    draw_box(panel, x, y, 0.92, 0.8, facecolor=color, edgecolor="#cccccc", lw=0.6)
    write(panel, x + 0.46, y + 0.37, text, "#555555" if value == "?" else "white", size=7.5, weight="bold")


class Frame(NamedTuple):
    """What one rank holds after a step."""

    held: Sequence[float]  # per chunk, the sum of 10**r over all ranks r that are in it: 1011 for ranks 0, 1 and 3
    arrived: Sequence[int] = ()  # the chunks received in this step
    sent: int = 0  # bytes that the rank has sent so far


def ring_frames(
    walks: Mapping[str, Sequence[Sequence[Frame]]], first: int = 0, tensor_bytes: int | None = None
) -> Figure:
    """A row of panels per walk and a panel per step, which has a row per rank and a column per chunk.

    `walks[name][rank][step]`. A stripe in a rank's colour means that this rank has contributed to the chunk. A complete
    chunk is dark, and chunks received in the step have a red frame. `first` is the number of the first step shown. With
    `tensor_bytes` (S), a red bar under each panel shows how many S the rank that sent the most has sent so far.
    """
    steps = max(len(walk[0]) for walk in walks.values())
    most = max(frames[-1].sent for walk in walks.values() for frames in walk)
    left, above, below, gap = 0.6, 0.5, 0.62 if tensor_bytes else 0.25, 0.16  # inches around panels, and between
    side = min((10 - left) / steps - gap, 1.6)  # of a panel
    width, height = left + steps * (side + gap), (above + side + below) * len(walks)
    figure, axes = plt.subplots(len(walks), steps, figsize=(width, height), squeeze=False, sharex=True, sharey=True)
    figure.subplots_adjust(left / width, below / height, 1 - gap / width, 1 - above / height)
    figure.subplots_adjust(wspace=gap / side, hspace=(above + below) / side)
    for row, (title, walk) in zip(axes, walks.items(), strict=True):
        row[0].annotate(title, (0, 1), (0, 20), "axes fraction", "offset points", fontsize=11, weight="bold")
        for step, (panel, frames) in enumerate(zip(row, zip(*walk, strict=True), strict=True), first):
            panel.set_title(f"step {step}" if step else "start", fontsize=9, pad=3)
            _draw_frames(panel, frames)
            if tensor_bytes:
                n, sent = len(frames), max(frame.sent for frame in frames)
                draw_box(panel, 0, 1.19 * n, n * sent / most, 0.09 * n, facecolor=SENT_COLOR, clip_on=False)
                write(panel, 0, 1.4 * n, f"{sent / tensor_bytes:.2f}·S sent", SENT_COLOR, ha="left")
    return figure


def _draw_frames(panel: Axes, frames: Sequence[Frame]) -> None:
    n = len(frames)
    red = {"fill": False, "edgecolor": SENT_COLOR, "lw": 1.5, "zorder": 3, "clip_on": False}
    for y, frame in enumerate(frames):
        for x, value in enumerate(frame.held):
            contributors = [rank for rank in range(n) if int(value) // 10**rank % 10]
            complete = len(contributors) == n
            color = SUM_COLOR if complete else "#f4f4f4"
            draw_box(panel, x + 0.07, y + 0.07, 0.86, 0.86, facecolor=color, edgecolor=QUIET, lw=0.6)
            for rank in () if complete else contributors:
                left, width = x + 0.12 + 0.76 * rank / n, 0.76 / n
                draw_box(panel, left, y + 0.12, width, 0.76, facecolor=rank_color(rank), lw=0)
        # if all chunks arrived: one frame around the row
        for x, width in [(0, n)] if len(frame.arrived) == n else [(chunk, 1) for chunk in frame.arrived]:
            draw_box(panel, x + 0.03, y + 0.03, width - 0.06, 0.94, **red)
    middles = [place + 0.5 for place in range(n)]
    panel.set_xticks(middles, range(n), fontsize=8, color=GREY)
    panel.set_yticks(middles, [f"rank {rank}" for rank in range(n)], fontsize=8, color=GREY)
    panel.tick_params(length=0, pad=2, labelbottom=True)
    panel.set(xlim=(0, n), ylim=(n, 0))
    panel.spines[:].set_visible(False)


def cut_products(
    x: torch.Tensor, w: torch.Tensor, by_columns: Sequence[torch.Tensor], by_rows: Sequence[torch.Tensor]
) -> Figure:
    """x @ w with w cut by columns (above) and by rows (below); `by_…`: what each rank has computed.

    A filled square is a number that is finished, in the colour of the rank that has it; a frame is a part of a sum;
    dark is a sum over all ranks.
    """
    n, (rows, inner), columns = len(by_columns), x.shape, w.shape[1]
    width = inner + (n + 2) * (columns + 1.1) + 3.2  # in squares of 0.34 inches
    figure, panels = plt.subplots(2, 1, figsize=(0.34 * (width + 1), 0.68 * (inner + 2)))
    figure.subplots_adjust(0, 0, 1, 1, hspace=0.05)
    of_column = [rank_color(place * n // columns) for place in range(columns)]
    of_row = [rank_color(place * n // inner) for place in range(inner)]
    for panel, parts, finished in zip(panels, (by_columns, by_rows), (True, False), strict=True):
        panel.set(xlim=(-0.4, width), ylim=(inner + 0.4, -1.5), aspect="equal")
        panel.axis("off")
        write(panel, 0, -1.1, f"W cut by {'columns' if finished else 'rows'}", "black", 11, weight="bold", ha="left")
        at = _draw_matrix(panel, 0, x, [[QUIET] * inner if finished else of_row] * rows, "X", "·")
        at = _draw_matrix(panel, at, w, [of_column if finished else [color] * columns for color in of_row], "W", "→")
        for rank, part in enumerate(parts):
            colors, sign = [[rank_color(rank)] * part.shape[1]] * rows, "" if finished or rank == n - 1 else "+"
            at = _draw_matrix(panel, at, part, colors, f"rank {rank}", sign, framed=not finished)
        write(panel, at + 1, rows / 2 - 0.35, "all-gather" if finished else "all-reduce", SENT_COLOR)
        write(panel, at + 1, rows / 2 + 0.35, "→", SENT_COLOR)
        y = torch.cat(tuple(parts), dim=1) if finished else sum(parts)
        colors = [of_column if finished else [SUM_COLOR] * columns] * rows
        _draw_matrix(panel, at + 2.8, y, colors, "Y, on both" if n == 2 else "Y, on all", "")
    return figure


def _draw_matrix(
    panel: Axes, left: float, matrix: torch.Tensor, colors: Sequence, name: str, sign: str, framed: bool = False
) -> float:
    """Draw a matrix of numbers from `left` on, colors[row][column]; return where the next one begins."""
    rows, columns = matrix.shape
    for y in range(rows):
        for column, color in enumerate(colors[y]):
            x, face, edge = left + column, *(("white", color) if framed else (color, "white"))
            draw_box(panel, x + 0.05, y + 0.05, 0.9, 0.9, lw=1.6, facecolor=face, edgecolor=edge)
            write(panel, x + 0.5, y + 0.5, f"{matrix[y, column]:g}", "black" if face in ("white", QUIET) else "white")
    write(panel, left + columns / 2, -0.3, name)
    write(panel, left + columns + 0.55, 1, sign, size=12)
    return left + columns + 1.1


class Station(NamedTuple):
    """A layer's output on one rank: its (tokens, features), those of the whole, and what was called before it."""

    name: str
    held: tuple[int, int]
    whole: tuple[int, int]
    calls: Sequence[str] = ()


def slice_layouts(plans: Mapping[str, Sequence[Station]], rank: int) -> Figure:
    """A strip per plan: each layer's output as tokens (down) × features (across), with what `rank` holds of it.

    In red: the collectives between one layer's output and the next.
    """
    longest = max(plans.values(), key=len)
    widest = max(station.whole[1] for station in longest)
    tall, step = 0.55, 1.45  # height of an output, and from one to the next; the widest is 1 wide
    figure, axes = plt.subplots(len(plans), 1, figsize=(1.15 * step * len(longest), 1.45 * len(plans)), squeeze=False)
    figure.subplots_adjust(0, 0, 1, 1, hspace=0.12)
    for panel, (title, stations) in zip(axes.flat, plans.items(), strict=True):
        panel.set(xlim=(-0.55, step * len(stations) - 0.3), ylim=(tall + 0.4, -0.5))
        panel.axis("off")
        write(panel, -0.5, -0.36, title, "black", 11, weight="bold", ha="left")
        for place, (name, held, whole, calls) in enumerate(stations):
            left, width = place * step, whole[1] / widest
            down, across = held[0] / whole[0], held[1] / whole[1]  # shares; slices are in the order of the ranks
            top, begin = (rank * share if share < 1 else 0 for share in (down, across))
            draw_box(panel, left, 0, width, tall, facecolor="white", edgecolor=QUIET)
            corner = left + begin * width, top * tall
            draw_box(panel, *corner, across * width, down * tall, facecolor=rank_color(rank), lw=0)
            write(panel, left + width / 2, tall + 0.14, name, "black", 8.5)
            write(panel, left + width / 2, tall + 0.3, f"{held[0]} × {held[1]}", size=8)
            if calls:
                x, arrow = left - 0.04, {"arrowstyle": "-|>", "color": SENT_COLOR, "lw": 0.9}
                write(panel, x, -0.08, "\n".join(calls).replace("_", "-"), SENT_COLOR, 8, va="bottom")
                panel.annotate("", (x, tall / 2), (x, -0.06), arrowprops=arrow)
    write(panel, -0.06, tall / 2, "tokens", size=8, rotation=90, ha="right")
    return figure


SIDE, STEP = 4, 5.5  # of a memory strip, in squares: elements in a row; from one moment to the next
WEIGHTS = ("own", "borrowed")  # the kinds that are weights


def memory_strips(
    strips: Mapping[str, Sequence[Moment]],
    rank: int,
    parts: Mapping[str, int],
    kinds: Sequence[str] = WEIGHTS,
    line: tuple[int, str] | None = None,
) -> Figure:
    """A strip per title with a column per moment: the squares are the elements that `rank` holds then.

    `parts`: {name: number of moments}, in order. `kinds`: those of the ledger to draw, each in its own band, from the
    bottom up. "own" has the rank's colour, row i of "borrowed" that of rank i; "partial" (a gradient of this rank's
    items alone) is frames in the rank's colour, "summed" is dark, any other kind grey. `line`: (elements, name), a
    height to compare with. The elements that the rank sends in a moment stand in red.
    """
    figure, axes = plt.subplots(len(strips), 1, squeeze=False)
    panels, longest = list(axes.flat), max(strips.values(), key=len)
    gap = 0 if line else 0.5  # between two kinds, if heights need not be compared
    heights = [_draw_strip(*each, rank, kinds, gap) for each in zip(panels, strips.values(), strict=True)]
    height, width = max(*heights, line[0] / SIDE if line else 0), STEP * len(longest)
    right = width - STEP + SIDE
    across, down = width + 8, len(strips) * (height + 4.6) + 9.2
    figure.set_size_inches(0.115 * across, 0.115 * down)
    figure.subplots_adjust(8 / across, 7 / down, 1, 1 - 2.2 / down, hspace=0)
    for panel, (title, moments) in zip(panels, strips.items(), strict=True):
        panel.set(xlim=(0, width), ylim=(-2.2, height + 2.4))
        panel.axis("off")
        write(panel, 0, height + 1.2, title, "black", 11, weight="bold", ha="left")
        weights, everything = (max(moment.elements(*those) for moment in moments) for those in (WEIGHTS, kinds))
        summary = f"sends {sum(moment.sent for moment in moments)}, holds at most {weights} weights"
        summary += f", {everything} numbers in all" if kinds != WEIGHTS else ""
        write(panel, right, height + 1.2, summary, size=10, ha="right")
        if line:
            panel.plot([0, right], [line[0] / SIDE] * 2, "--", color=SUM_COLOR, lw=1)
    begin = 0.0
    for name, number in parts.items():
        write(panels[0], begin, height + 3.7, name, SUM_COLOR, 11, ha="left", style="italic")
        for panel in panels if begin else ():
            panel.vlines(begin - 0.75, -2.2, height, color=QUIET, lw=1, zorder=0)
        begin += number * STEP
    for column, moment in enumerate(longest):
        turned = {"rotation": 40, "rotation_mode": "anchor", "ha": "right", "va": "top"}
        write(panels[-1], column * STEP + SIDE / 2 + 0.8, -2.2, moment.name, "black", **turned)
    if line:
        write(panels[0], -0.8, line[0] / SIDE, line[1], SUM_COLOR, ha="right")
    return figure


def _draw_strip(panel: Axes, moments: Sequence[Moment], rank: int, kinds: Sequence[str], gap: float) -> float:
    """Return its height, in rows."""
    write(panel, -0.8, -0.9, "sends", SENT_COLOR, ha="right")
    for column, moment in enumerate(moments):
        write(panel, column * STEP + SIDE / 2, -0.9, moment.sent or "", SENT_COLOR, weight="bold")
    floor = 0.0
    for kind in kinds:
        tops = [floor]
        for column, moment in enumerate(moments):
            y = floor
            for held in moment.held:
                if held.kind == kind:
                    y = _draw_tensor(panel, column * STEP, y, held, rank)
            tops.append(y)
        if max(tops) > floor:
            write(panel, -0.8, (floor + max(tops) + gap) / 2, kind, ha="right")
            floor = max(tops) + gap
    return floor


def _draw_tensor(panel: Axes, left: float, floor: float, held: Held, rank: int) -> float:
    """Draw a tensor's rows, the first one on top; return the floor of the next tensor."""
    top = floor - (-held.elements // SIDE)
    for element in range(held.elements):
        row, column = divmod(element, SIDE)
        colors = {"own": rank_color(rank), "borrowed": rank_color(row), "summed": SUM_COLOR}
        look = {"facecolor": colors.get(held.kind, QUIET), "lw": 0}
        if held.kind == "partial":
            look = {"facecolor": "white", "edgecolor": rank_color(rank), "lw": 1.1}
        draw_box(panel, left + column + 0.08, top - row - 0.92, 0.84, 0.84, **look)
    if held.elements > SIDE:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        write(panel, left + SIDE / 2, (floor + top) / 2, held.name, "black", 8.5, weight="bold", bbox=box)
    return top


def attention_map(computed: Mapping[str, Sequence[torch.Tensor]]) -> Figure:
    """A panel for each name: a square for every pair of a query (row) and a key (column), in its rank's colour.

    `computed[name][rank]`: bool (tokens, tokens), true where that rank computed the pair's score. White: nobody did.
    Beneath stand the ranks' numbers of pairs.
    """
    figure, panels = style.titled_panels(computed, 3.9 * len(computed), 4.3)
    for panel, ranks in panels:
        tokens = len(ranks[0])
        picture = torch.ones(tokens, tokens, 3)
        for rank, pairs in enumerate(ranks):
            picture[pairs.cpu()] = torch.tensor(to_rgb(rank_color(rank)))
            at, below = (rank + 0.5) / len(ranks), {"transform": panel.transAxes}
            write(panel, at, -0.19, f"rank {rank}", rank_color(rank), weight="bold", **below)
            write(panel, at, -0.26, f"{int(pairs.sum())}", size=10, **below)
        panel.imshow(picture.numpy(), extent=(0, tokens, tokens, 0), interpolation="nearest")
        quarters = range(0, tokens + 1, tokens // 4)
        panel.set(xlabel="key's position", xticks=quarters, yticks=quarters)
        panel.spines[:].set_visible(True)
    figure.axes[0].set_ylabel("query's position")
    return figure


Point = torch.Tensor  # of shape (2,): the two parameters of a model


def gradient_arrows(
    loss: Callable[[Point], torch.Tensor], start: Point, gradients: Sequence[Point], whole: Point
) -> Figure:
    """Arrows of each rank's gradient and of their mean from `start`, on the contours of the loss.

    `loss` takes the two parameters as a tensor of shape (2,), `gradients` holds a tensor of shape (2,) per rank, and
    `whole` is the gradient of the whole batch. Arrows point downhill, from `start` to `start` minus the gradient. The
    left panel shows them in full length, the right one each rank's divided by the number of ranks, in a chain.
    """
    start, n = start.detach(), len(gradients)
    steps = [-gradient for gradient in gradients]
    chain = torch.stack([start, *(step / n for step in steps)]).cumsum(0)  # each arrow begins where the last one ends
    ends = torch.stack([start, *(start + step for step in steps)])
    contents = {"minus each gradient, and their mean": ends, f"1/{n} of each, end to end (closer)": chain}
    figure, panels = style.titled_panels(contents, 9.2, 3.9)
    for panel, points in panels:
        _draw_contours(panel, loss, points)
        _draw_arrow(panel, start, -whole, "#f2c14e", width=10, name="whole batch")
        panel.plot(*start.tolist(), "o", color="black", ms=5, zorder=6)
        panel.set(xlabel="w[0]", ylabel="w[1]", aspect="equal")
        panel.spines[:].set_visible(True)
    left, right = figure.axes
    for rank, step in enumerate(steps):
        _draw_arrow(left, start, step, rank_color(rank), width=2.5, name=f"rank {rank}")
        _draw_arrow(right, chain[rank], step / n, rank_color(rank), width=2.5)
    _draw_arrow(left, start, sum(steps) / n, SUM_COLOR, width=1.6, name="mean of the ranks")
    style.add_legend(figure, *left.get_legend_handles_labels(), loc="outside lower center", ncols=n + 2, fontsize=10)
    return figure


def _draw_contours(panel: Axes, loss: Callable[[Point], torch.Tensor], shown: torch.Tensor) -> None:
    """The loss at 80 × 80 points of a square that contains all points of `shown`, of shape (points, 2)."""
    low, high = shown.min(0).values, shown.max(0).values
    middle, half = (low + high) / 2, 0.62 * (high - low).max()
    across, up = (torch.linspace(place - half, place + half, 80, dtype=shown.dtype) for place in middle)
    height = torch.stack([torch.stack([loss(torch.stack([a, b])) for a in across]) for b in up]).detach()
    levels = torch.logspace(height.min().log10() + 0.05, height.max().log10(), 14).tolist()
    panel.contour(across, up, height, levels=levels, colors=QUIET, linewidths=0.8, zorder=1)


def _draw_arrow(panel: Axes, at: Point, step: Point, color: str, width: float, name: str | None = None) -> None:
    """`width` is in points. The tip is exactly at the end, even of a wide arrow."""
    head = {"headwidth": 2 + 4 / width, "headlength": 1.5 + 8 / width, "headaxislength": 1.5 + 8 / width}
    exact = {"angles": "xy", "scale_units": "xy", "scale": 1, "units": "dots"}
    dots = width * panel.figure.dpi / 72
    panel.quiver(*at.tolist(), *step.tolist(), color=color, width=dots, zorder=5 - width / 10, **head, **exact)
    panel.plot([], [], color=color, lw=width, label=name)
