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
import socket
import ssl
import sys
import threading
from typing import Any

import psutil

from scratch_ddp.cells.hosts.door import Ticket, fingerprint, make_client_context, own_versions
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.kernel.cluster import LauncherProcess
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.kernel.reader import Event, Reader
from scratch_ddp.cells.words import ClusterError

_CONNECT_LIMIT = 20.0  # seconds
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")  # of torchrun and srun
_NOT_AS_AN_ARGUMENT = (
    "every user of this host can read a process's arguments, so a ticket does not belong there. "
    "Write join - <<< TICKET, with a new ticket if you do not trust them"
)
_OVER = "the ticket has been used, or its time is over"
_LOCAL_NUMBERS = ("LOCAL_RANK", "SLURM_LOCALID")
_OF_LAUNCHERS = ("TORCHELASTIC_", "ROLE_", "GROUP_", "MASTER_")  # torchrun's, for ranks that it starts itself


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 after %dist_shutdown, 1 if the notebook was lost or never reached."""
    parser = argparse.ArgumentParser(prog="python -m scratch_ddp.cells.join", description=__doc__)
    parser.add_argument("ticket", metavar="-", help="standard input: the ticket that %%dist_init has printed")
    parser.add_argument("--address", help="of this host, where it has several: the one towards the other hosts")
    options = parser.parse_args(arguments)
    if (number := _first_number(_LOCAL_NUMBERS)) is not None and number > 0:
        _say("one agent serves the whole host: this further one has nothing to do")
        return 0
    try:
        if options.ticket != "-":
            raise ClusterError(_NOT_AS_AN_ARGUMENT)
        ticket = Ticket.parse(sys.stdin.readline())
        channel = enter(ticket, options.address)
    except (ClusterError, ValueError) as error:
        _say(f"{error}.")
        return 1
    return _serve(channel, ticket)


def enter(ticket: Ticket, address: str | None = None) -> TlsChannel:
    """Connect, make sure that it is the notebook of this ticket, show the secret. Raises ClusterError."""
    where = f"{ticket.address}:{ticket.port}"
    try:
        source = (address, 0) if address else None
        plain = socket.create_connection((ticket.address, ticket.port), _CONNECT_LIMIT, source)
        sock = make_client_context().wrap_socket(plain)
    except OSError as error:
        raise ClusterError(_why_not(error, where)) from None
    if not hmac.compare_digest(fingerprint(sock.getpeercert(binary_form=True)), ticket.fingerprint):
        sock.close()
        raise ClusterError(f"whoever answers at {where} is not the notebook that has printed this ticket")
    hello = {"secret": ticket.secret, "name": socket.gethostname(), "address": sock.getsockname()[0]}
    hello |= {"node": _first_number(_NODE_NUMBERS), "versions": own_versions()}
    sock.sendall(json.dumps(hello).encode() + b"\n")
    channel = TlsChannel(sock)
    try:
        while not (messages := channel.receive()):
            pass  # a part of the answer has come
    except EOFError as error:
        raise ClusterError(f"the notebook at {where} {error}: {_OVER}") from None
    if messages[0]["type"] == "refused":
        raise ClusterError(f"the notebook at {where} did not let this host in: {messages[0]['why']}")
    return channel


def _why_not(error: OSError, where: str) -> str:
    if isinstance(error, (ConnectionRefusedError, ConnectionResetError)):
        return f"nobody listens at {where} any more: {_OVER}"
    if isinstance(error, TimeoutError):
        return f"{where} does not answer: does this host reach it, does a firewall let the port through"
    if isinstance(error, ssl.SSLError):
        return f"whoever listens at {where} does not speak TLS 1.3 ({error.reason})"
    return f"{where} can't be reached: {error.strerror or error}"


def _serve(channel: TlsChannel, ticket: Ticket) -> int:
    own = channel.own_address
    _say(f"joined the notebook at {ticket.address}:{ticket.port}; ranks here talk over {interface_of(own)} ({own})")
    agent = Agent(channel)
    try:
        agent.serve()
    except EOFError as error:
        _say(f"{agent.failure or f'the notebook {error}'}. The ranks of this host have been ended.")
        return 1
    except KeyboardInterrupt:
        _say("interrupted. The ranks of this host have been ended.")
        return 1
    _say("the notebook has let this host go.")
    return 0


class Agent:
    """Serves the kernel at the other end of `channel`.

    Two threads. The main thread carries out what the kernel sends. The other, that of `Reader`, sends what the ranks
    say. If network or kernel are slow, ranks that write much wait; a Stop gets through all the same.
    """

    def __init__(self, channel: TlsChannel):
        self.channel = channel
        self.failure = ""
        self._ending = False
        self._processes: dict[int, RankProcess] = {}  # by the numbers that the kernel gives
        self._numbers: dict[RankProcess, int] = {}
        self._lock = threading.Lock()  # for the two tables of processes
        self.launcher = LauncherProcess(Reader(self))
        self.folder = self.launcher.root / "cluster"
        self.folder.mkdir()

    def serve(self) -> None:
        """Until the kernel lets this host go. Raises EOFError if it is lost."""
        try:
            while True:
                for message in self.channel.receive():
                    if message["type"] == "let go":
                        return
                    self._carry_out(message)
        finally:
            self._ending = True
            self.launcher.close()

    # What the kernel wants

    def _carry_out(self, message: dict[str, Any]) -> None:
        if message["type"] == "start":
            self._start(message["process"], message["config"])
        elif message["type"] == "end":
            self.launcher.end(self._processes[message["process"]])
        elif message["type"] == "to":
            self._pass_on(self._processes[message["process"]], message["message"])

    def _start(self, number: int, config: dict[str, Any]) -> None:
        place = {"folder": str(self.folder), "directory": os.getcwd(), "path": list(sys.path), "store": "link"}
        environment = _environment(self.channel.own_address) | config["environment"]
        with self._lock:  # its first message may be read at once
            process = self.launcher.start(config | place | {"environment": environment})
            self._processes[number], self._numbers[process] = process, number

    def _pass_on(self, process: RankProcess, message: dict[str, Any]) -> None:
        if message["type"] == "taken":
            self.launcher.reader.note_taken(message["size"])
        elif message["type"] == "execute":
            self.launcher.execute(process, message)
        else:
            process.channel.send(message)

    # What the ranks say (the reader takes this agent for its queue of events)

    def put(self, event: Event) -> None:
        """Send an event to the kernel."""
        if event.kind == "text":
            pipe = event.source
            data = base64.b64encode(event.value).decode()
            self._send(pipe.rank, {"type": "text", "cell": pipe.cell, "data": data})
        elif isinstance(event.source, RankProcess):
            told = {"type": "gone"} if event.kind == "gone" else {"type": "from", "message": event.value}
            self._send(event.source, told)
        elif event.kind == "message":
            self._send_from_launcher(event.value)
        elif not self._ending:
            self.failure = f"The process that starts ranks has ended. {event.source.log()}".strip().rstrip(".")
            self.channel.send({"type": "failed", "why": self.failure})
            self.channel.shut_down()

    def _send_from_launcher(self, message: dict[str, Any]) -> None:
        if message["type"] == "launcher ready":
            self.channel.send({"type": "agent ready", "gpu_count": message["gpu_count"]})
            return
        with self._lock:
            running = [each for each in self._processes.values() if each.status is None]
        if message["type"] == "started":
            process = [each for each in running if each.rank == message["rank"]][-1]
            process.pid = message["pid"]
            self._send(process, message)
        for process in [each for each in running if message["type"] == "ended" and each.pid == message["pid"]]:
            process.status = message["status"]
            self._send(process, message)

    def _send(self, process: RankProcess, message: dict[str, Any]) -> None:
        with self._lock:
            number = self._numbers[process]
        self.channel.send(message | {"process": number})


def _environment(address: str) -> dict[str, str]:
    """That of the ranks: the agent's, and the network interface through which it reaches the notebook."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    interface = interface_of(address)
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} | kept
    return own | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def interface_of(address: str) -> str:
    """The name of the network interface that has an address."""
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(each.address.split("%")[0] == address for each in addresses):
            return name
    if ipaddress.ip_address(address).is_loopback:  # 127.0.0.2 belongs to it without being listed
        return next((name for name in ("lo", "lo0") if name in interfaces), "lo")
    raise ValueError(f"no interface of this host has the address {address}")


def _first_number(names: tuple[str, ...]) -> int | None:
    """The first of these environment variables that is set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def _say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
