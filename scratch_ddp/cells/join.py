"""`python -m scratch_ddp.cells.join - <<< TICKET`: this host joins a notebook on another machine and runs its ranks.

Run it once on each host, by hand or by any launcher that starts a command on each and passes on its standard input
(torchrun, srun). The ticket is taken from standard input alone: every user of a host can read a process's arguments.
"""

import argparse
import hmac
import os
import socket
import ssl
import sys

from scratch_ddp.cells.hosts.agent import Agent, interface_of
from scratch_ddp.cells.hosts.certificate import fingerprint, make_client_context
from scratch_ddp.cells.hosts.ticket import Ticket
from scratch_ddp.cells.hosts.tls_channel import TlsChannel
from scratch_ddp.cells.hosts.versions import own_versions

_CONNECT_LIMIT = 20.0  # seconds
_NODE_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")  # of torchrun and srun
_NOT_AS_AN_ARGUMENT = (
    "every user of this host can read a process's arguments, so a ticket does not belong there. "
    "Write join - <<< TICKET, with a new ticket if you do not trust them"
)
_LOCAL_NUMBERS = ("LOCAL_RANK", "SLURM_LOCALID")


class JoinError(RuntimeError):
    """This host can't join; the message says why."""


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
            raise JoinError(_NOT_AS_AN_ARGUMENT)
        ticket = Ticket.parse(sys.stdin.readline())
        channel = enter(ticket, options.address)
    except (JoinError, ValueError) as error:
        _say(f"{error}.")
        return 1
    return _serve(channel, ticket)


def enter(ticket: Ticket, address: str | None = None) -> TlsChannel:
    """Connect, make sure that it is the notebook of this ticket, show the secret. Raises JoinError."""
    where = f"{ticket.address}:{ticket.port}"
    try:
        source = (address, 0) if address else None
        plain = socket.create_connection((ticket.address, ticket.port), _CONNECT_LIMIT, source)
        sock = make_client_context().wrap_socket(plain)
    except (ConnectionRefusedError, ConnectionResetError):
        raise JoinError(f"nobody listens at {where} any more: the ticket has been used, or its time is over") from None
    except TimeoutError:
        raise JoinError(
            f"{where} does not answer: does this host reach it, does a firewall let the port through"
        ) from None
    except ssl.SSLError as error:
        raise JoinError(f"whoever listens at {where} does not speak TLS 1.3 ({error.reason})") from None
    except OSError as error:
        raise JoinError(f"{where} can't be reached: {error.strerror or error}") from None
    if not hmac.compare_digest(fingerprint(sock.getpeercert(binary_form=True)), ticket.fingerprint):
        sock.close()
        raise JoinError(f"whoever answers at {where} is not the notebook that has printed this ticket")
    channel = TlsChannel(sock)
    hello = {"secret": ticket.secret, "name": socket.gethostname(), "address": channel.own_address}
    channel.send(hello | {"node": _first_number(_NODE_NUMBERS), "versions": own_versions()})
    try:
        while not (messages := channel.receive()):
            pass  # a part of the answer has come
    except EOFError as error:
        raise JoinError(f"the notebook at {where} {error}: the ticket has been used, or its time is over") from None
    if messages[0]["type"] == "refused":
        raise JoinError(f"the notebook at {where} did not let this host in: {messages[0]['why']}")
    return channel


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


def _first_number(names: tuple[str, ...]) -> int | None:
    """The first of these environment variables that is set."""
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def _say(text: str) -> None:
    print(f"{socket.gethostname()}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
