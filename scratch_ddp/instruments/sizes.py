"""Sizes and other figures as text. A unit means one thing: 1 MB is 10**6 bytes, 1 MiB is 2**20."""

import re

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(text: str | int) -> int:
    """Return bytes: "10MiB" and "10 mib" are 10,485,760, "10MB" is 10,000,000, "4096" and 4096 are 4,096.

    Raises ValueError, naming the units, for any other text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", str(text).strip())
    factors = {unit.lower(): factor for unit, factor in UNITS.items()}
    if not found or (found[2] or "B").lower() not in factors:
        raise ValueError(f"{text!r} is no size: write a number and one of {', '.join(UNITS)}, such as 10MiB")
    return int(float(found[1]) * factors[(found[2] or "B").lower()])


def format_size(size: int) -> str:
    """The shortest exact text: 1048576 is "1 MiB", 1000000 is "1 MB", 1500 is "1,500 B"."""
    for unit in ("GiB", "MiB", "KiB", "GB", "MB", "KB"):
        if size and size % UNITS[unit] == 0 and size // UNITS[unit] < 10_000:
            return f"{size // UNITS[unit]} {unit}"
    return f"{size:,} B"


def three_digits(value: float) -> str:
    """Three significant digits without an exponent for large numbers: "0.00324", "12.4", "2,090"."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{float(f'{value:.3g}'):,.0f}"
