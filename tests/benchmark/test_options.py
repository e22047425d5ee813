"""Numbers that no benchmark can be run with: refused in a line, with status 2, before anything is measured."""

import sys

import pytest

from scratch_ddp.benchmark.__main__ import main

COUNTS = [
    *[(command, option) for command in ("ddp", "fsdp", "pipeline", "zero") for option in ("--rounds", "--ranks")],
    *[("link", "--rounds"), ("link", "--transfers"), ("collectives", "--ranks")],
]


@pytest.fixture
def refused(monkeypatch, capsys):
    """Run a command that must be refused; what it says."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed, said = capsys.readouterr()
        assert ended.value.code == 2 and not printed and "Traceback" not in said
        return said

    return run


@pytest.mark.parametrize("command, option", COUNTS)
@pytest.mark.parametrize("bad", ["0", "-1", "1.5", "nan"])
def test_counts(refused, command, option, bad):
    assert refused(command, option, bad).endswith(
        f"argument {option}: a whole number, 1 or more, is needed, not '{bad}'\n"
    )


@pytest.mark.parametrize("command", ["rings", "collectives"])
@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "soon"])
def test_seconds(refused, command, bad):
    assert refused(command, "--seconds", bad).endswith(
        f"argument --seconds: a number of seconds, more than 0, is needed, not '{bad}'\n"
    )
