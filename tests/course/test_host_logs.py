"""The recorded logs: whole, with any names for the hosts, and with nothing of the machine that recorded them."""

import re

import pytest
import torch

from scratch_ddp.course.inputs.host_logs import RECORDED, fault_in, read_logs, read_logs_of_another_job, recordings
from scratch_ddp.course.lessons.lesson_16_failures import faulty_host


def test_each_cause_is_recorded_on_either_host():
    faults = {fault_in(recording) for recording in recordings()}
    assert faults == {(host, cause) for host in RECORDED for cause in ("interface", "name", "version")}


@pytest.mark.parametrize("recording", recordings())
def test_a_recording_is_read_under_other_names(recording):
    logs = read_logs(recording, ("x1", "y2"))
    assert list(logs) == ["x1", "y2"] and fault_in(recording, ("x1", "y2"))[0] in logs
    for host, log in logs.items():
        assert log.startswith(f"+ hostname\n{host}\n") and not any(name in log for name in RECORDED)
        assert not re.search(r"/(home|root|tmp|work|usr)/", log)


@pytest.mark.parametrize("shorter", ["x", "y", ""])
@pytest.mark.parametrize("recording", recordings())
def test_another_job_has_the_same_fault_and_other_numbers(recording, shorter):
    generator = torch.Generator().manual_seed(len(recording))
    for _ in range(5):
        logs = read_logs_of_another_job(recording, ("x", "y"), generator, shorter)
        text = "".join(logs.values())
        assert not re.search(r"10\.77\.|29500|9f47a571|\b1122 |2026-11-22", text)
        assert faulty_host(logs) == fault_in(recording, ("x", "y"))
        own = {host: log.splitlines()[3] for host, log in logs.items()}
        other = {"x": "y", "y": "x"}.get(shorter)
        assert not other or (own[other].startswith(own[shorter]) and own[other] != own[shorter])
        assert shorter or own["x"].split(".")[3] == own["y"].split(".")[3]
