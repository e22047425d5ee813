"""For `pytest --nbval`: kernels need no TCP ports, and fresh outputs are cleaned as saved ones are."""


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
