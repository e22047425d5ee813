"""`python -m scratch_ddp.cells.join - <<< TICKET`: this host joins a notebook on another machine and runs its ranks.

Run it once on each host, by hand or by any launcher that starts a command on each and passes on its standard input
(torchrun, srun). The ticket is taken from standard input alone: every user of a host can read a process's arguments.

To its launcher and its ranks the agent is what the kernel is on one machine: same pipes, same channels.
When the notebook is gone the agent ends, and its launcher ends the ranks, as it does when the agent is killed.
"""

import argparse
import base64
import hmac
import ipaddress
import json
import os
import queue
import socket
import sys
import threading
from typing import Any

import psutil

from scratch_ddp.cells.hosts.door import Ticket, fingerprint, make_client_context, own_versions
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.cluster import LauncherProcess, loopback
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Reader
from scratch_ddp.cells.words import ClusterError

_CONNECT_LIMIT = 20.0  # seconds
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")  # of torchrun and srun
_OVER = "the ticket has been used, or its time is over"
_OF_LAUNCHERS = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_")  # torchrun's, for ranks that it starts itself


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after %dist_shutdown, 1 if the notebook was lost or never reached."""
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.cells.join", description=__doc__)
    parser.add_argument("ticket", metavar="-", choices=["-"], help="it is read from standard input")
    parser.add_argument("--address", help="of this host, where it has several: the one towards the other hosts")
    options = parser.parse_args(arguments)
    launcher = None
    try:
        ticket = Ticket.parse(sys.stdin.readline())
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        launcher = LauncherProcess(Reader(events))
        channel = enter(ticket, launcher.await_ready(events), options.address)
        own = channel.socket.getsockname()[0]
        _say(f"joined the notebook at {ticket.address}:{ticket.port}; ranks here talk over {interface_of(own)} ({own})")
        Agent(channel, launcher, events).serve()
        _say("the notebook has let this host go.")
        return 0
    except (ClusterError, ValueError) as error:
        _say(f"{error}.")
    except (EOFError, KeyboardInterrupt) as error:
        _say(f"{error or 'interrupted'}. The ranks of this host have been ended.")
    finally:
        if launcher is not None:
            launcher.close()
    return 1


def enter(ticket: Ticket, gpu_count: int, address: str | None = None) -> TlsChannel:
    """Connect, make sure that it is the notebook of this ticket, show the secret. Raises ClusterError."""
    where = f"{ticket.address}:{ticket.port}"
    try:
        source = (address, 0) if address else None
        plain = socket.create_connection((ticket.address, ticket.port), _CONNECT_LIMIT, source)
        sock = make_client_context().wrap_socket(plain)
    except OSError as error:
        raise ClusterError(f"{where} can't be reached ({error}): {_OVER}, or a firewall lets nothing through") from None
    if not hmac.compare_digest(fingerprint(sock.getpeercert(binary_form=True)), ticket.fingerprint):
        sock.close()
        raise ClusterError(f"whoever answers at {where} is not the notebook that has printed this ticket")
    node = next((int(os.environ[name]) for name in _NODE_NUMBERS if name in os.environ), None)
    hello = {"secret": ticket.secret, "name": socket.gethostname(), "address": sock.getsockname()[0]}
    hello |= {"node": node, "versions": own_versions(), "gpu_count": gpu_count}
    sock.sendall(json.dumps(hello).encode() + b"\n")
    channel = TlsChannel(sock)
    try:
        while not (messages := channel.receive()):
            pass  # a part of the answer has come
    except EOFError:
        raise ClusterError(f"the notebook at {where} has ended the connection: {_OVER}") from None
    if messages[0]["type"] == "refused":
        raise ClusterError(f"the notebook at {where} did not let this host in: {messages[0]['why']}")
    return channel


class Agent:
    """Serves the kernel at the other end of `channel`.

    Two threads. The main thread carries out what the kernel sends. The other sends what ranks and launcher say. If
    network or kernel are slow, ranks that write much wait; a Stop gets through all the same.
    """

    def __init__(self, channel: TlsChannel, launcher: LauncherProcess, events: "queue.SimpleQueue[Event]"):
        self.channel, self.launcher, self.events = channel, launcher, events
        self._lost = "the notebook was lost"
        self._ranks: dict[int, RankProcess] = {}
        self._folder = launcher.root / "cluster"
        self._folder.mkdir()
        threading.Thread(target=self._send_events, name="sends-events", daemon=True).start()

    def serve(self) -> None:
        """Until the kernel lets this host go. Raises EOFError if the kernel is lost, or the launcher."""
        try:
            while True:
                for message in self.channel.receive():
                    if message["type"] == "let go":
                        return
                    self._carry_out(message)
        except EOFError:
            raise EOFError(self._lost) from None

    def _carry_out(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "start":
            config = message["config"]
            place = {"folder": str(self._folder), "directory": os.getcwd(), "path": list(sys.path), "store": "link"}
            environment = _environment(self.channel.socket.getsockname()[0]) | config["environment"]
            self._ranks[config["process"]] = self.launcher.start(config | place | {"environment": environment})
        elif kind == "taken":
            self.launcher.reader.note_taken(message["size"])
        elif kind == "end":
            self.launcher.end(self._ranks[message["process"]])
        elif message["message"]["type"] == "execute":
            self.launcher.execute(self._ranks[message["process"]], message["message"])
        else:
            self._ranks[message["process"]].channel.send(message["message"])

    def _send_events(self) -> None:
        while True:
            event = self.events.get()
            kind, source, value = event.kind, event.source, event.value
            if kind == "text":
                data = base64.b64encode(value).decode()
                self.channel.send({"type": "text", "process": source.rank.number, "cell": source.cell, "data": data})
            elif kind == "gone" and source is self.launcher:
                self._lost = "the process that starts ranks has ended"
                self.channel.shut_down()
            elif kind == "gone":
                self.channel.send({"type": "gone", "process": source.number})
            else:
                if value["type"] == "ready":
                    source.pid = value["pid"]
                elif value["type"] == "ended" and value["process"] in self._ranks:
                    self._ranks[value["process"]].status = value["status"]  # its pid may be another's from here on
                number = None if source is self.launcher else source.number
                self.channel.send({"type": "from", "process": number, "message": value})


def _environment(address: str) -> dict[str, str]:
    """That of the ranks: the agent's, and the network interface through which it reaches the notebook."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    interface = interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | kept


def interface_of(address: str) -> str:
    """The name of the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return name
    if ipaddress.ip_address(address).is_loopback:  # 127.0.0.2 belongs to it without being listed
        return loopback()
    raise ValueError(f"no interface of this host has the address {address}")


def _say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
