"""Logs of jobs on two hosts, in each of which one thing is wrong. All are recorded; each file says how."""

from pathlib import Path

FOLDER = Path(__file__).with_name("host_logs")


def recordings() -> list[str]:
    """The names of all recordings, as in "job_2"."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def read_logs(recording: str) -> dict[str, str]:
    """Return what each host has printed, by its name."""
    text = (FOLDER / f"{recording}.txt").read_text(encoding="utf-8")
    return dict(part.split("\n", 1) for part in text.split("== ")[1:])
