"""The recorded logs: whole, with any names for the hosts, and with nothing of the machine that recorded them."""

import re

import pytest

from scratch_ddp.course.inputs.host_logs import FOLDER, RECORDED, read_logs, recordings
from scratch_ddp.course.lessons.lesson_16 import faulty_host

FAULTS = {  # recording: the host at fault and the cause, as its first line says
    each: (FOLDER / f"{each}.txt").read_text(encoding="utf-8").splitlines()[0].removeprefix("# fault: ").split(", ")
    for each in recordings()
}


@pytest.mark.parametrize("recording", FAULTS)
def test_a_recording_is_read_under_other_names(recording):
    logs, (host, cause) = read_logs(recording, ("x1", "y2")), FAULTS[recording]
    assert list(logs) == ["x1", "y2"] and faulty_host(logs) == (list(logs)[RECORDED.index(host)], cause)
    for name, log in logs.items():
        assert log.startswith(f"+ hostname\n{name}\n") and not any(each in log for each in RECORDED)
        assert not re.search(r"/(home|root|tmp|work|usr)/", log)


def test_each_cause_is_recorded_on_either_host():
    causes = ("interface", "name", "version")
    assert {tuple(each) for each in FAULTS.values()} == {(host, cause) for host in RECORDED for cause in causes}
