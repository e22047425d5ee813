import gc

import pytest
import torch

# Ranks are forked from the test process: it must not have started a pool of threads before.
torch.set_num_threads(1)


def pytest_collection():
    """Import everything without collecting garbage on the way: that takes seconds and finds none."""
    gc.disable()


def pytest_collection_finish():
    """Leave what is loaded now out of all later collections: each would copy the whole heap in a forked rank."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def _shared_kernel():
    from tests.kernel import Kernel

    with Kernel(cluster=4) as kernel:
        yield kernel


@pytest.fixture
def four_ranks(_shared_kernel):
    """A kernel with four ranks, shared by many tests; started anew if the test before has lost one."""
    if _shared_kernel.run("pass").error:
        _shared_kernel.run("%dist_reset")
        started = _shared_kernel.run("%dist_init -n 4")
        assert not started.error, started.traceback
    return _shared_kernel
