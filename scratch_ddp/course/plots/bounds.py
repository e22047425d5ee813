"""Which bound binds: a map over the number of devices and the batch; in JupyterLab also with sliders."""

import os
from collections.abc import Callable, Sequence
from functools import partial

import matplotlib.pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scratch_ddp.course.plots.style import draw_quiet_frame
from scratch_ddp.instruments.cost import BOUNDS, CLUSTERS, MODELS, what_binds

_COLORS = ("#8cc08a", "#f2b27a", "#b89acb", "#e39a9d", "#e4e4e4")  # in the order of BOUNDS
_DEVICES, _BATCHES, _SEQUENCE = [2**k for k in range(4, 15)], [2**k for k in range(3, 15)], 2048
_DENSE = [name for name, shape in MODELS.items() if not shape.experts]


def bound_map(
    panels: dict[str, Callable[[int, int], str]], devices: Sequence[int], batches: Sequence[int], sequence: int
) -> Figure:
    """A map for each name: its function gets (devices, sequences in a step) and returns one of BOUNDS.

    The axes are powers of two; the batch is shown in tokens, `sequence` to a sequence.
    """
    size = (3.4 * len(panels) + 0.9, 3.9)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained")
    colors = ListedColormap(_COLORS)
    for panel, (name, binds) in zip(axes.flat, panels.items(), strict=True):
        grid = [[BOUNDS.index(binds(n, batch)) for n in devices] for batch in batches]
        panel.imshow(grid, origin="lower", aspect="auto", cmap=colors, vmin=-0.5, vmax=len(BOUNDS) - 0.5)
        panel.set_title(name, fontsize=10, loc="left")
        panel.set_xticks(range(0, len(devices), 2), [f"{n:,}" for n in devices[::2]])
        panel.set_xlabel("devices", fontsize=9)
        draw_quiet_frame(panel)
    axes.flat[0].set_yticks(range(0, len(batches), 2), [_tokens(batch * sequence) for batch in batches[::2]])
    axes.flat[0].set_ylabel("tokens in a step", fontsize=9)
    handles = [Patch(color=color, label=name) for name, color in zip(BOUNDS, _COLORS, strict=True)]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(BOUNDS), fontsize=8, frameon=False)
    return figure


def one_map(model: str = "XXL", cluster: str = "H100", tp: int = 8, checkpointing: bool = True) -> Figure:
    """The map of one model on one cluster, for sequences of 2048 tokens."""
    binds = partial(
        what_binds, MODELS[model], CLUSTERS[cluster], sequence=_SEQUENCE, tp=tp, checkpointing=checkpointing
    )
    name = f"{model} on {cluster}, tp {tp}{', checkpointing' if checkpointing else ''}"
    return bound_map({name: binds}, _DEVICES, _BATCHES, _SEQUENCE)


def bound_sliders() -> Figure | None:
    """Show the map with sliders for the model, the cluster, tp and checkpointing. Return a Figure where it can't be.

    JupyterLab names the notebook in the kernel's environment; a run without a browser, as for saving outputs, does not.
    """
    try:
        import ipywidgets
    except ImportError:
        ipywidgets = None
    if ipywidgets is None or "JPY_SESSION_NAME" not in os.environ:
        return one_map()
    tp = ipywidgets.SelectionSlider(options=[1, 2, 4, 8], value=8)
    ipywidgets.interact(one_map, model=_DENSE, cluster=list(CLUSTERS), tp=tp, checkpointing=True)
    return None


def _tokens(number: int) -> str:
    return f"{number / 2**20:g} Mi" if number >= 2**20 else f"{number / 2**10:g} Ki"
