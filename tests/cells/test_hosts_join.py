"""Who may join a notebook: tickets, the door, strangers, versions."""

import contextlib
import io
import json
import queue
import socket
import ssl
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from scratch_ddp.cells import join
from scratch_ddp.cells.hosts import door as door_module
from scratch_ddp.cells.hosts.door import Door, Ticket, make_client_context, open_door, own_versions
from scratch_ddp.cells.hosts.host import Host, gather, place_ranks
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event
from scratch_ddp.cells.words import ClusterError


@pytest.fixture
def door():
    opened = Door("127.0.0.1")
    yield opened
    opened.close()


class _Gathering:
    """`gather` in a thread. The hosts of these tests are threads too, and start no ranks."""

    def __init__(self, door: Door, count: int, limit: float = 20):
        self.said: list[str] = []
        self.hosts: list[Host] = []
        self.error = ""
        self._thread = threading.Thread(target=self._gather, args=(door, count, limit))
        self._thread.start()

    def _gather(self, *arguments) -> None:
        try:
            self.hosts = gather(*arguments, queue.SimpleQueue(), self.said.append)
        except ClusterError as error:
            self.error = str(error)

    def finish(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


def a_host(ticket: Ticket) -> TlsChannel:
    return join.enter(ticket, gpu_count=0)


def test_a_ticket_is_read_as_it_was_written():
    for address in ("10.0.0.5", "fd00::5"):
        ticket = Ticket(address, 43211, "f" * 43)
        assert Ticket.parse(f" {ticket}\n") == ticket and ticket.secret not in repr(ticket)
    assert Ticket("a", 1, "f" * 43).secret != Ticket("a", 1, "f" * 43).secret
    for text in ("", "10.0.0.5:43211", str(ticket)[:-1], str(ticket) + "x"):
        with pytest.raises(ValueError, match="not a whole ticket"):
            Ticket.parse(text)


def test_a_ticket_is_taken_from_standard_input_alone(door, monkeypatch, capsys):
    """Everybody can read a process's arguments."""
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{door.ticket}\n"))
    with pytest.raises(SystemExit):
        join.main([str(door.ticket)])
    assert door.ticket.secret in sys.stdin.read()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert join.main(["-"]) == 1 and "not a whole ticket" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        ("0.0.0.0", "name the one address at which the hosts reach this machine"),
        ("127.0.0.1:x", "can't listen there"),
        ("192.0.2.77", "can't listen there"),
    ],
)
def test_an_address_that_will_not_do(listen, told):
    with pytest.raises(ClusterError, match=told):
        open_door(listen)


def test_hosts_join_in_the_order_of_their_nodes_and_a_ticket_is_used_once(door, monkeypatch):
    gathering = _Gathering(door, 2)
    channels = []
    for node in ("1", "0"):
        monkeypatch.setenv("SLURM_NODEID", node)
        channels.append(a_host(door.ticket))
    gathering.finish()
    assert [host.node for host in gathering.hosts] == [0, 1]
    assert gathering.said[0].endswith("has joined: 1 of 2.") and gathering.said[1].endswith("has joined: 2 of 2.")
    with pytest.raises(ClusterError, match="the ticket has been used"):
        a_host(door.ticket)


def test_time_is_up(door):
    gathering = _Gathering(door, 3, limit=2)
    channel = a_host(door.ticket)
    gathering.finish()
    assert f"1 of 3 hosts have joined within 2 s: {socket.gethostname()} (127.0.0.1)." in gathering.error
    assert channel.receive() == [{"type": "let go"}]
    with pytest.raises(ClusterError, match="its time is over"):
        a_host(door.ticket)


def test_a_host_that_is_greeted_after_all_others_have_come_is_refused(door):
    sock = make_client_context().wrap_socket(_in_clear(b"")(door))
    time.sleep(0.3)  # the door awaits its hello
    door.close()
    sock.sendall(json.dumps({"secret": door.ticket.secret}).encode() + b"\n")
    assert TlsChannel(sock).receive()[0]["type"] == "refused"


def test_other_versions_are_refused_on_both_sides(door, monkeypatch):
    gathering = _Gathering(door, 1)
    with monkeypatch.context() as patch:
        patch.setattr(join, "own_versions", lambda: own_versions() | {"torch": "0.9"})
        with pytest.raises(ClusterError, match="it has torch 0.9, and the notebook 2"):
            a_host(door.ticket)
    channel = a_host(door.ticket)
    gathering.finish()
    assert gathering.hosts and "it has torch 0.9" in gathering.said[0]
    channel.close()


@pytest.mark.parametrize(
    ("gpus", "backend", "chosen", "why"),
    [
        ((2, 4), "nccl", [0, 1, 0, 1], "over nccl: ranks 0–1 on a, GPU 0, 1; ranks 2–3 on b, GPU 0, 1"),
        ((2, 1), "interruptible", [0, 1, 0, 0], "over gloo: ranks 0–1 on a, GPU 0, 1; ranks 2–3 on b, GPU 0"),
        ((0, 2), "interruptible", [None, None, 0, 1], "over gloo: ranks 0–1 on a, CPU; ranks 2–3 on b, GPU 0, 1"),
    ],
)
def test_each_host_has_its_own_gpus(gpus, backend, chosen, why):
    hosts = [SimpleNamespace(name=name, gpu_count=count) for name, count in zip("ab", gpus, strict=True)]
    placement = place_ranks(hosts, 2, SimpleNamespace(gpu_ids=None, device=None, backend=None))
    assert (placement.backend, placement.gpus, placement.why) == (backend, chosen, why)


def test_an_agent_knows_which_of_its_ranks_have_ended(tmp_path):
    """When its launcher dies, it ends the process groups of the others: the number of an ended one may be reused."""
    launcher, sent = SimpleNamespace(root=tmp_path), queue.SimpleQueue()
    agent = join.Agent(SimpleNamespace(send=sent.put), launcher, queue.SimpleQueue())
    agent._ranks = {number: RankProcess(number, None, launcher, number, pid=1) for number in range(2)}
    agent.events.put(Event("message", launcher, {"type": "ended", "process": 1, "status": -9}))
    sent.get(timeout=5)
    assert [rank.status for rank in agent._ranks.values()] == [None, -9]


def test_an_agent_shows_its_secret_to_nobody_else():
    context, _ = door_module._make_server_context()
    server = socket.create_server(("127.0.0.1", 0))
    received = []

    def serve():
        sock, _ = server.accept()
        with contextlib.suppress(OSError), context.wrap_socket(sock, server_side=True) as tls:
            received.append(tls.recv(100))

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ClusterError, match="is not the notebook that has printed this ticket"):
        a_host(Ticket(*server.getsockname(), "f" * 43))
    thread.join(5)
    server.close()
    assert received in ([], [b""])


def _in_clear(data: bytes):
    def stranger(door: Door) -> socket.socket:
        sock = socket.create_connection((door.ticket.address, door.ticket.port))
        sock.sendall(data)
        return sock

    return stranger


def _old_tls(door: Door) -> socket.socket:
    context = make_client_context()
    context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):
        context.wrap_socket(_in_clear(b"")(door))
    return socket.socket()


def _says(data: bytes):
    def stranger(door: Door) -> socket.socket:
        sock = make_client_context().wrap_socket(_in_clear(b"")(door))
        sock.sendall(data)
        return sock

    return stranger


STRANGERS = [
    _in_clear(b""),
    _in_clear(b"GET / HTTP/1.0\r\n\r\n" * 50),
    _old_tls,
    _says(b'{"secret": "guess", "name": "x", "address": "y", "node": 0, "versions": {}}\n'),
    _says(b"{}\n"),
    _says(b"\x80\x04}q\x00.\n"),
    _says(b"[" * 4000 + b"\n"),
]


def test_strangers_are_shown_out_and_stop_nothing(door, monkeypatch):
    monkeypatch.setattr(door_module, "_HELLO_LIMIT", 0.3)
    sockets = [stranger(door) for stranger in STRANGERS]
    until = time.monotonic() + 5
    while door.strangers < len(STRANGERS):
        assert time.monotonic() < until
        time.sleep(0.01)
    gathering = _Gathering(door, 1)
    channel = a_host(door.ticket)
    gathering.finish()
    assert len(gathering.hosts) == 1 and gathering.said[-1] == "Turned away: 7 connections without the ticket."
    for each in (channel, *sockets):
        each.close()
