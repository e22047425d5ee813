"""A test that compares seconds may fail twice, but not always; other tests have one try."""

pytest_plugins = ["pytester"]
TESTS = """
import itertools, pytest
count = itertools.count(1).__next__

@pytest.mark.measures_time
def test_noisy():
    assert count() == 3

@pytest.mark.measures_time
def test_wrong():
    assert count() == 0

def test_not_of_time():
    assert count() == 8
"""


def test_three_tries(pytester):
    pytester.makeini("[pytest]\nmarkers = measures_time")
    pytester.makepyfile(TESTS)
    pytester.makeconftest("from tests.retries import pytest_runtest_protocol")
    ran = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    ran.assert_outcomes(passed=1, failed=2, warnings=4)
    ran.stdout.fnmatch_lines(["*try 1 of 3 failed*", "*try 2 of 3 failed*"])
