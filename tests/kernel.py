"""The kernel driver of the benchmark, for tests (`from tests.kernel import Kernel`)."""

from scratch_ddp.benchmark.kernel import Kernel, Result
from tests.processes import alive, wait_until_gone

__all__ = ["Kernel", "Result", "alive", "wait_until_gone"]
