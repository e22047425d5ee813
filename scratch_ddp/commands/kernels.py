"""Kernels without TCP ports, for notebooks that run without a browser."""

import tempfile
from typing import Any

from jupyter_client.manager import AsyncKernelManager, KernelManager


class _OverUnixSockets:
    """Talk to the kernel through files in a private folder.

    A manager chooses free TCP ports, and its kernel binds them a second later. Ranks that start in between, here or in
    another notebook, may be given the same ports; the kernel then dies at its start.
    """

    def __init__(self, **traits: Any):
        # The kernel's folder would do as well, but the path of a socket has room for about 100 bytes only.
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True)
        super().__init__(transport="ipc", ip=f"{self._folder.name}/socket", **traits)


class SocketKernelManager(_OverUnixSockets, KernelManager):
    pass


class AsyncSocketKernelManager(_OverUnixSockets, AsyncKernelManager):
    pass
