"""What a link is: its seconds a message, its seconds a byte, its name, and where the figures come from."""

from dataclasses import dataclass

from scratch_ddp.cost.wire import Wire, refuse_unless_finite


@dataclass(frozen=True)
class Link:
    """The wire at each rank. A collective or message takes `alpha` + rounds·`per_round` + bytes·`beta` seconds.

    `alpha`: seconds a call; `beta`: seconds for each byte that a rank sends (or receives, if that is more);
    `per_round`: seconds for each round of the algorithm, of which a ring's all-reduce among n ranks has 2(n−1) and a
    message has one; `source`: where the figures come from. Raises ValueError if a figure is negative, infinite or NaN.
    """

    alpha: float
    beta: float
    name: str = ""
    source: str = ""
    per_round: float = 0.0

    def __post_init__(self) -> None:
        refuse_unless_finite(alpha=self.alpha, beta=self.beta, per_round=self.per_round)

    def seconds(self, nbytes: float, rounds: int = 0) -> float:
        """How long the wire is taken by one collective or message."""
        return self.alpha + self.per_round * rounds + self.beta * nbytes

    def wire(self, world_size: int) -> Wire:
        """The same link for the forecasts of `scratch_ddp.cost`."""
        return Wire(self.alpha, self.beta, world_size, self.per_round)

    def __str__(self) -> str:
        speed = f"{1e-9 / self.beta:.3g} GB/s" if self.beta else "any number of bytes at once"
        round_ = f", {self.per_round * 1e6:g} µs a round" if self.per_round else ""
        return f"{self.name or 'link'}: {self.alpha * 1e6:g} µs a call{round_}, {speed}"
