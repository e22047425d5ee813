"""The recorded logs: whole, with any names for the hosts, and with nothing of the machine that recorded them."""

import re

import pytest

from scratch_ddp.course.inputs.host_logs import FOLDER, RECORDED, read_logs, recordings
from scratch_ddp.course.lessons.lesson_16 import faulty_host


def fault_in(recording, names=RECORDED):
    """The host at fault, under its name in `names`, and the cause: the recording's first line says it."""
    first_line = (FOLDER / f"{recording}.txt").read_text(encoding="utf-8").splitlines()[0]
    host, cause = first_line.removeprefix("# fault: ").split(", ")
    return names[RECORDED.index(host)], cause


def test_each_cause_is_recorded_on_either_host():
    faults = {fault_in(recording) for recording in recordings()}
    assert faults == {(host, cause) for host in RECORDED for cause in ("interface", "name", "version")}


@pytest.mark.parametrize("recording", recordings())
def test_a_recording_is_read_under_other_names(recording):
    logs = read_logs(recording, ("x1", "y2"))
    assert list(logs) == ["x1", "y2"] and faulty_host(logs) == fault_in(recording, ("x1", "y2"))
    for host, log in logs.items():
        assert log.startswith(f"+ hostname\n{host}\n") and not any(name in log for name in RECORDED)
        assert not re.search(r"/(home|root|tmp|work|usr)/", log)
