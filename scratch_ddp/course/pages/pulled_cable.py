"""The training of `interrupted_run` on two hosts whose cable is pulled: how it is recorded, and the record.

A cable needs network namespaces, and these need root, so the lesson shows what was recorded:

    sudo .venv/bin/python -m scratch_ddp.course.pages.pulled_cable
"""

import json
from pathlib import Path

from scratch_ddp.course.pages.interrupted_run import InterruptedRun, torchrun
from scratch_ddp.instruments import namespaces

RECORD = Path(__file__).parents[1] / "inputs" / "pulled_cable.json"
PULL_AFTER = 7  # steps
TIMEOUT = 10  # seconds that a rank waits for another


def read_record() -> dict:
    """Return what was recorded: the time limit, who noticed after how many seconds, and the lines of the step log."""
    return json.loads(RECORD.read_text())


class PulledCable(InterruptedRun):
    """The hosts are two network namespaces; the cable between them is pulled and stays out."""

    def run(self) -> None:
        with namespaces.connected():  # ends what runs there, too
            hosts = []
            for name, address in zip(namespaces.NAMES, namespaces.ADDRESSES, strict=True):
                program = torchrun(f"{namespaces.ADDRESSES[0]}:29500", address)
                in_host = [*namespaces.within(name), "env", "GLOO_SOCKET_IFNAME=cable"]
                hosts.append(self.start("hosts", program, f"--timeout {TIMEOUT}", in_host))
            self.after(PULL_AFTER, "cable", lambda: namespaces.plug("down"))
            hosts[0].wait(180)


if __name__ == "__main__":
    run = PulledCable().wait()
    (failure,) = run.failures
    lines = [{name: line[name] for name in ("step", "loss", "ranks", "time")} for line in run.lines]
    same = max(abs(line["loss"] - run.plain[step]["loss"]) for step, line in run.steps.items()) < 1e-12
    record = {"command": "python -m scratch_ddp.course.pages.pulled_cable, as root", "timeout": TIMEOUT}
    record |= {"pulled": failure.killed_at, "noticed": failure.noticed, "same_losses": same, "lines": lines}
    RECORD.write_text(json.dumps(record) + "\n")
