"""The map of bounds with sliders, where JupyterLab runs the notebook; elsewhere one picture of it."""

import os
from functools import partial

from matplotlib.figure import Figure

from scratch_ddp.course.plots.bound_map import bound_map
from scratch_ddp.instruments.cost import CLUSTERS, MODELS, what_binds

_DEVICES, _BATCHES, _SEQUENCE = [2**k for k in range(4, 15)], [2**k for k in range(3, 15)], 2048
_DENSE = [name for name, shape in MODELS.items() if not shape.experts]


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
