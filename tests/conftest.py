import gc

import pytest
import torch

from tests.retries import pytest_runtest_protocol  # noqa: F401, pytest finds the hook here

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

    with Kernel(env={"SCRATCH_DDP_PRELOAD": "scratch_ddp.course torch._dynamo"}) as kernel:  # once, not on each rank
        kernel.run("%load_ext scratch_ddp")
        yield kernel


@pytest.fixture(scope="module")
def _shared_cluster(_shared_kernel):
    """Ended with the module: gloo's threads wake up 100 times a second for every process group that tests have made."""
    _start_ranks(_shared_kernel)
    yield _shared_kernel
    _shared_kernel.run("%dist_shutdown")


@pytest.fixture
def bare(_shared_kernel):
    """A kernel with the extension and no ranks."""
    _shared_kernel.run("%dist_shutdown")
    return _shared_kernel


@pytest.fixture
def four_ranks(_shared_cluster):
    """A kernel with four ranks, shared by many tests; started anew if the test before has lost one, or ended them."""
    if _shared_cluster.run("%%rank [0]\npass").error:
        _shared_cluster.run("%dist_reset")
        _start_ranks(_shared_cluster)
    return _shared_cluster


def _start_ranks(kernel):
    started = kernel.run("%dist_init -n 4", timeout=120)
    assert not started.error, started.traceback
