"""Hosts that are lost, kernels that are killed, cables that are pulled; agents that torchrun and srun have started."""

import os
import signal
import sys
import time

import pytest

from tests import namespaces
from tests.cells.hosts import JOIN, Agent, HostsOfKernel, in_namespaces
from tests.kernel import Kernel, wait_until_gone

TALK = "import time\nwhile True:\n    time.sleep(0.05)\n    dist.all_reduce(torch.ones(1))"
SUM = "dist.all_reduce(x := torch.tensor([rank])); x.item()"


def started(kernel, start, **options):
    hosts = HostsOfKernel(kernel, start=start, **options)
    hosts.init()
    assert kernel.run(SUM).text() == "6   ← ranks 0–3\n"
    return hosts


def by_torchrun(ticket):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", str(20000 + os.getpid() % 10000)]
    return [Agent([*torchrun, "--node-rank", str(node), *JOIN[1:]], ticket) for node in (1, 0)]


def test_under_torchrun_and_an_agent_that_is_killed(bare):
    """Nodes are in torchrun's order, its variables are not the ranks'; a lost agent is named and its ranks end."""
    kernel, hosts = bare, started(bare, by_torchrun)
    foreign = "[name for name in os.environ if name.startswith(('TORCHELASTIC', 'MASTER'))]"
    code = f"import os\nprint(os.environ['RANK'], {foreign})"
    assert kernel.run(code).text().splitlines()[3] == "3 []   ← rank 3"
    second, first = hosts.agents
    family, agent = second.family(), second.agent()
    cell = kernel.start(TALK)
    time.sleep(1)
    began = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    message = kernel.finish(cell).message
    assert "rank 2 was lost with host" in message
    assert "rank 3 was lost with host" in message and "rank 0" not in message and time.monotonic() - began < 4
    wait_until_gone([pid for pid in family if pid != second.process.pid], 10)
    assert "The cluster can't go on: %dist_init starts a new one" in kernel.run("1").message
    kernel.run("%dist_shutdown")
    hosts.end()


@pytest.mark.skipif(namespaces.missing() != "", reason=namespaces.missing())
def test_a_cable_is_pulled():
    """No end-of-file arrives: both sides notice the silence, the notebook names the host, the far ranks end."""
    with namespaces.connected(), Kernel(within=namespaces.within(namespaces.NAMES[0])) as kernel:
        kernel.run("%load_ext scratch_ddp")
        hosts = started(kernel, in_namespaces, address=namespaces.ADDRESSES[0])
        cell = kernel.start(TALK)
        time.sleep(1)
        began = time.monotonic()
        namespaces.plug("down")
        message = kernel.finish(cell).message
        assert time.monotonic() - began < 10
        assert f"({namespaces.ADDRESSES[1]})" in message and "rank 3 was lost with host" in message
        namespaces.wait_until_empty(namespaces.NAMES[1], 10)
        assert "the notebook was lost. The ranks of this host" in hosts.agents[1].finish()[1]
        assert kernel.run("%dist_shutdown").text() == "Ranks 0–3 ended.\n"


def test_a_killed_kernel_leaves_nothing_on_any_host():
    kernel = Kernel().__enter__()
    kernel.run("%load_ext scratch_ddp")
    hosts = HostsOfKernel(kernel)
    hosts.init()
    family = hosts.family()
    kernel.start(TALK)
    time.sleep(0.5)
    kernel.kill()
    wait_until_gone(family, 10)
    assert all("the notebook was lost" in agent.finish()[1] for agent in hosts.agents)
    kernel.client.stop_channels()
    kernel.manager.cleanup_resources()
