"""Logs of jobs on two hosts, in each of which one thing is wrong. All are recorded; each file says how."""

import re
from pathlib import Path

import torch

FOLDER = Path(__file__).with_name("host_logs")
RECORDED = ("alder", "birch")  # the hosts' names in the files
_CARDS = ("eth0", "eth1", "ens3", "ens5", "eno1", "enp4s0", "bond0", "ib0")


def recordings() -> list[str]:
    """The names of all recordings, as in "job_2"."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def read_logs(recording: str, names: tuple[str, str] = RECORDED) -> dict[str, str]:
    """Return what each host has printed, by its name. `names` take the place of those in the recording."""
    text = (FOLDER / f"{recording}.txt").read_text(encoding="utf-8")
    return _by_host(text, names)


def _by_host(text: str, names: tuple[str, str]) -> dict[str, str]:
    for old, new in zip(RECORDED, names, strict=True):
        text = text.replace(old, new)
    return dict(part.split("\n", 1) for part in text.split("== ")[1:])


def read_logs_of_another_job(
    recording: str, names: tuple[str, str], generator: torch.Generator, shorter: str
) -> dict[str, str]:
    """As `read_logs`, with what differs from job to job drawn: addresses, cards, ports, versions, times, warnings.

    shorter: the host whose address the other one's begins with; "" if the addresses end alike.
    """

    def draw(*bounds: int) -> int:
        return int(torch.randint(*bounds, (), generator=generator))

    text = (FOLDER / f"{recording}.txt").read_text(encoding="utf-8")
    network, least, net = f"10.{draw(1, 255)}", draw(1, 25), draw(1, 254)
    ends = [f"{net}.{least}", f"{net}.{least}{draw(10)}" if shorter else f"{net + 1}.{least}"]
    first, second = (f"{network}.{end}" for end in (ends[::-1] if shorter == names[1] else ends))
    cards = torch.randperm(len(_CARDS), generator=generator).tolist()
    ours, theirs = (f"{draw(2**31, 2**32):08x}" for _ in range(2))
    versions = f"it has scratch_ddp 0.2.0 (code {ours}), and the notebook 0.2.0 (code {theirs})"
    if draw(2):
        versions = f"it has torch 2.{draw(6, 12)}.0, and the notebook 2.13.{draw(3)}"
    later, date = draw(1000, 2000), f"{draw(1, 13):02}{draw(1, 29):02}"
    changes = {
        r"10\.77\.0\.1(?!\d)": first,
        r"10\.77\.0\.2(?!\d)": second,
        r"\beth0\b": _CARDS[cards[0]],
        r"\bens5\b": _CARDS[cards[draw(2)]],  # in half the jobs it is a card that the other host has
        r"\b29500\b": str(draw(20_000, 60_000)),
        r"(?<=notebook at )(\S+):\d+": rf"\1:{draw(20_000, 60_000)}",
        r"it has scratch_ddp .*(?=\. Install)": versions,
        r"\b18(?=:5\d:)|(?<=_)18(?=:5\d:)": f"{draw(24):02}",
        r"1122(?= )": date,
        r"2026-11-22": f"2026-{date[:2]}-{date[2:]}",
        r"(?<=pid: )\d+|(?<=\.\d{6} )\d{4}(?= torch)|(?<=birch_)\d+": lambda found: str(int(found[0]) + later),
        r"\[W.*cannot be retrieved\. err=-3\n": lambda found: found[0] * draw(12),  # a warning that tells nothing
    }
    for pattern, instead in changes.items():
        text = re.sub(pattern, instead, text)
    return _by_host(text, names)


def fault_in(recording: str, names: tuple[str, str] = RECORDED) -> tuple[str, str]:
    """Return the host at fault, under its name in `names`, and the cause."""
    first_line = (FOLDER / f"{recording}.txt").read_text(encoding="utf-8").splitlines()[0]
    host, cause = first_line.removeprefix("# fault: ").split(", ")
    return names[RECORDED.index(host)], cause
