"""Sizes and other figures as text, and read from it. A unit means one thing: 1 MB is 10**6 bytes, 1 MiB is 2**20."""

import argparse
import re

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def count(text: str) -> int:
    """`type=` of an option: a whole number, 1 or more. argparse refuses others with status 2, before anything runs."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number, 1 or more, is needed, not {text!r}")
    return int(text)


def parse_size(text: str | int) -> int:
    """Bytes: "10MiB" is 10,485,760, "10MB" 10,000,000, "4096" and 4096 are 4,096. Raises ValueError for other texts."""
    factors = {unit.lower(): factor for unit, factor in UNITS.items()} | {"": 1, "b": 1}
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(text).strip().lower())
    if not found or found[2] not in factors:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(UNITS)}, such as 10MiB")
    return int(float(found[1]) * factors[found[2]])


def format_size(size: int) -> str:
    """The shortest exact text: 1048576 is "1 MiB", 1000000 is "1 MB", 1500 is "1,500 B"."""
    for unit, factor in UNITS.items():
        if size and size % factor == 0 and size // factor < 10_000:
            return f"{size // factor} {unit}"
    return f"{size:,} B"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent for large numbers: "0.00324", "12.4", "2,090"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
