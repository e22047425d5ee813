"""Numbers of the command line: `type=` of an option. argparse refuses a bad one, with status 2, before all else."""

import argparse
import math


def count(text: str) -> int:
    """How often or how many: a whole number, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, is needed, not {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """How long: a number of seconds, more than 0 and finite."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:  # nan is not
        raise argparse.ArgumentTypeError(f"a number of seconds, more than 0, is needed, not {text!r}")
    return value
