"""A test that compares seconds may fail twice, but not always; other tests have one try."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import itertools, pytest

tries = {name: itertools.count(1) for name in ("noisy", "wrong", "not of time")}

@pytest.fixture
def number(request):
    return next(tries[request.param])

@pytest.mark.measures_time
@pytest.mark.parametrize("number", ["noisy"], indirect=True)
def test_noisy(number):
    assert number == 3

@pytest.mark.measures_time
@pytest.mark.parametrize("number", ["wrong"], indirect=True)
def test_wrong(number):
    assert number == 0

@pytest.mark.parametrize("number", ["not of time"], indirect=True)
def test_not_of_time(number):
    assert number == 3
"""


def test_three_tries(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.retries import pytest_runtest_protocol\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = measures_time\n")
    (tmp_path / "test_tries.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(tmp_path)]
    said = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "2 failed, 1 passed, 4 warnings" in said, said
    assert said.count("assert 1 == 3") == 3  # a warning; and the failure of a test with one try, told twice
    assert "try 2 of 3 failed" in said and "assert 3 == 0" in said
