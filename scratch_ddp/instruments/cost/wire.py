"""The bytes and rounds of a collective, and the seconds it takes: T = α·P + β·n for P messages and n bytes.

Sources: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009), for the ring; the factors in PERFORMANCE.md of NVIDIA/nccl-tests; R. Hockney, "The
communication challenge for MPP", Parallel Computing 20 (1994), for α and β.
"""

import math
from dataclasses import dataclass
from numbers import Real

# Seconds with which NCCL itself forecasts a ring (NVIDIA/nccl, src/graph/tuning.cc, protocol Simple): of a call, and of
# a round, which depend on the hardware that it passes.
CALL = 8.4e-6
NVLINK, PCIE, NETWORK = 3.4e-6, 5.7e-6, 14.0e-6


def ring_bytes(call: str, payload: int, n: int, rank: int, root: int | None = None) -> int:
    """Bytes that `rank` (of `n`, in the group) sends when the collective `call` runs on a ring.

    `payload`: bytes of this rank's input: S for all_reduce and broadcast, the rank's own chunk for all_gather and
    gather, all n chunks together for reduce_scatter, all_to_all and the source of a scatter. `root`: the group rank of
    the source or destination, if the collective has one. Raises ValueError for an unknown collective.
    """
    if n == 1:
        return 0
    if call == "all_reduce":
        return round(2 * (n - 1) * payload / n)  # a reduce-scatter, then an all-gather of n parts
    if call == "all_gather":
        return (n - 1) * payload
    if call in ("reduce_scatter", "all_to_all"):
        return round((n - 1) * payload / n)
    if call == "broadcast":
        return 0 if (rank + 1) % n == root else payload  # the last rank on the ring passes nothing on
    if call in ("reduce", "gather"):
        return 0 if rank == root else payload
    if call == "scatter":
        return round((n - 1) * payload / n) if rank == root else 0
    if call == "barrier":
        return 0
    raise ValueError(f"no formula for {call!r}")


def ring_rounds(call: str, n: int) -> int:
    """Messages that follow one another when the collective `call` runs on a ring of `n` ranks."""
    return (2 if call in ("all_reduce", "barrier") else 1) * (n - 1)


def transfer_seconds(alpha: float, beta: float, calls: int, nbytes: float) -> float:
    """Seconds for `calls` messages, one after the other, with `nbytes` bytes in total: α·P + β·n.

    `alpha`: seconds per message; `beta`: seconds per byte. Raises ValueError if a value is negative, infinite or NaN.
    """
    refuse_unless_finite(alpha=alpha, beta=beta, calls=calls, nbytes=nbytes)
    return alpha * calls + beta * nbytes


@dataclass(frozen=True)
class Wire:
    """What connects `world_size` ranks, each of which sends over a wire of its own, one message at a time.

    A collective takes `alpha` seconds, `per_round` seconds for each of its rounds, and `beta` seconds per byte that a
    rank sends. Raises ValueError if a value is negative, infinite or NaN, or if there is no rank.
    """

    alpha: float
    beta: float
    world_size: int
    per_round: float = 0.0

    def __post_init__(self) -> None:
        refuse_unless_finite(alpha=self.alpha, beta=self.beta, per_round=self.per_round)
        if not isinstance(self.world_size, int) or self.world_size < 1:
            raise ValueError(f"world_size must be a whole number of ranks, 1 or more, not {self.world_size!r}")

    def all_reduce(self, nbytes: float) -> float:
        """Seconds for an all-reduce of `nbytes` bytes on a ring; 0 for a single rank."""
        return self.alpha_of_all_reduce + self.beta_of_all_reduce * nbytes

    def all_gather(self, nbytes: float) -> float:
        """Seconds for an all-gather that leaves `nbytes` bytes on each rank, or a reduce-scatter of as many."""
        n = self.world_size
        if n == 1:
            return 0.0
        return self.alpha + self.per_round * ring_rounds("all_gather", n) + self.beta * nbytes * (n - 1) / n

    def message(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes` bytes from one rank to another."""
        return self.alpha + self.per_round + self.beta * nbytes

    @property
    def alpha_of_all_reduce(self) -> float:
        """Seconds that an all-reduce takes regardless of its size."""
        if self.world_size == 1:
            return 0.0
        return self.alpha + self.per_round * ring_rounds("all_reduce", self.world_size)

    @property
    def beta_of_all_reduce(self) -> float:
        """Seconds per byte of the tensor: β·2(n−1)/n, since a ring sends almost twice what it sums."""
        return self.beta * 2 * (self.world_size - 1) / self.world_size


def refuse_unless_finite(**values: float) -> None:
    """Raise ValueError, naming the value, unless all are finite numbers that are 0 or more."""
    for name, value in values.items():
        if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name} must be a finite number, 0 or more, not {value!r}")
