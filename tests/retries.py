"""Tests that compare seconds get three tries: what else the machine does can spoil one, but a defect spoils all."""

import pytest
from _pytest.runner import runtestprotocol

TRIES = 3


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Report the first try that passes, else the last one. Each try before it that failed is shown as a warning."""
    if item.get_closest_marker("measures_time") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for number in range(1, TRIES + 1):
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        problems = [report.longreprtext for report in reports if report.failed]
        if not problems or number == TRIES:
            break
        item.warn(pytest.PytestWarning(f"try {number} of {TRIES} failed: {problems[0]}"))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
