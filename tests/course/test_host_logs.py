"""The recorded logs: each cause on either host, found by the reference, and nothing of the machine they are from."""

import re

from scratch_ddp.course.inputs.host_logs import FOLDER, read_logs, recordings
from scratch_ddp.course.lessons.lesson_16 import faulty_host


def test_each_cause_is_recorded_on_either_host_and_found():
    faults = set()
    for recording in recordings():
        logs, text = read_logs(recording), (FOLDER / f"{recording}.txt").read_text(encoding="utf-8")
        assert text.startswith("# fault: " + ", ".join(fault := faulty_host(logs)))
        for host, log in logs.items():
            assert log.startswith(f"+ hostname\n{host}\n") and not re.search(r"/(home|root|tmp|work|usr)/", log)
        faults.add(fault)
    assert faults == {(host, cause) for host in ("alder", "birch") for cause in ("interface", "name", "version")}
