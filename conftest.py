"""For `pytest --nbval`: kernels need no TCP ports, and fresh outputs are cleaned as saved ones are.

What the ranks of a lesson import, their launcher imports once: on few cores that takes as long as for each rank.
"""

import os

import pytest

PRELOADED = "scratch_ddp.course torch._dynamo matplotlib.figure"  # optimizers import the second
LLAMA = "transformers.models.llama.modeling_llama"
NEED_LLAMA = ("from transformers import", "load_model", "held_by_ranks")


def pytest_configure(config):
    if not config.getoption("nbval", False):
        return
    import nbval.kernel
    import nbval.plugin

    from scratch_ddp.commands.notebooks import SocketKernelManager
    from scratch_ddp.commands.outputs import clean_outputs

    nbval.kernel.KernelManager = SocketKernelManager

    merge = nbval.plugin.coalesce_streams
    # nbval's own loop over backspaces never runs, so a line that was wiped out would count as a difference.
    nbval.plugin.coalesce_streams = lambda outputs: merge(clean_outputs(outputs))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before a lesson's first cell, with which its kernel starts."""
    if item.path.suffix == ".ipynb":
        lesson = item.path.read_text(encoding="utf-8")
        more = [LLAMA] if any(word in lesson for word in NEED_LLAMA) else []
        os.environ["SCRATCH_DDP_PRELOAD"] = " ".join([PRELOADED, *more])
