"""T = α + β·S: what a message costs on this machine, fitted to measured times and kept for later lessons."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from scratch_ddp.instruments.sizes import three_digits

FILE = "this_machine.json"


@dataclass(frozen=True)
class AlphaBeta:
    """T(S) = alpha + beta·S, in seconds and seconds per byte.

    `worst`: how far it is off the times that it was fitted to, at most: 0.2 is a time that the line misses by 20 %.
    """

    alpha: float
    beta: float
    worst: float = 0.0

    def seconds(self, size: float) -> float:
        """Seconds for a message of `size` bytes, by the line."""
        return self.alpha + self.beta * size

    @property
    def half_way(self) -> float:
        """Bytes at which both terms are equal: half of the bandwidth 1/beta is reached there."""
        return self.alpha / self.beta

    def __str__(self) -> str:
        rate = f"{three_digits(1e-9 / self.beta)} GB/s" if self.beta else "no limit"
        line = f"α = {three_digits(self.alpha * 1e6)} µs, β = {three_digits(self.beta * 1e9)} ns per byte ({rate})"
        return f"{line}, off by at most {self.worst:.0%}"


def fit(sizes: Sequence[int], seconds: Sequence[float]) -> AlphaBeta:
    """Fit α and β to the times, with the least sum of squared relative residuals.

    Relative, since absolute residuals of the largest size would outweigh all others: 20 % of a second is more than the
    whole time of a small message. Raises ValueError if there are fewer than three different sizes, or if the fit has a
    negative α or β, which no message can have.
    """
    if len(set(sizes)) < 3:
        raise ValueError(f"{len(set(sizes))} sizes are too few for a line: measure 3 or more")
    size, time = np.array(sizes, dtype=float), np.array(seconds)
    beta, alpha = np.polyfit(size, time, deg=1, w=1 / time).tolist()
    if alpha <= 0 or beta <= 0:
        what, hint = ("β", "larger") if beta <= 0 else ("α", "smaller")
        raise ValueError(
            f"the line has a {what} of {min(alpha, beta):.2g}, and a message can't cost less than nothing: "
            f"measure {hint} sizes too, and for longer"
        )
    return AlphaBeta(alpha, beta, float(np.abs(1 - (alpha + beta * size) / time).max()))


def save_machine(fits: dict[str, AlphaBeta], folder: Path | str = ".") -> Path:
    """Add fits, by their `key`, to `this_machine.json`, and return its path. Call it on one rank."""
    path = Path(folder) / FILE
    kept = {name: asdict(found) for name, found in (_read(path) | fits).items()}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return path


def load_machine(ranks: int = 2, folder: Path | str = ".") -> AlphaBeta | None:
    """Return the all-reduce's fit kept for this machine, of gloo before others, or None if there is none.

    Raises ValueError if the file exists and can't be read.
    """
    found = _read(Path(folder) / FILE)
    names = [key("all_reduce", backend, ranks) for backend in ("gloo", "interruptible", "nccl")]
    return next((found[name] for name in names if name in found), None)


def key(operation: str, backend: str, ranks: int) -> str:
    """The name under which a fit is kept."""
    return f"{operation}, {backend}, {ranks} ranks"


def _read(path: Path) -> dict[str, AlphaBeta]:
    if not path.exists():
        return {}
    try:
        return {name: AlphaBeta(**each) for name, each in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and measure again as lesson 07 does") from None
