"""What a collective costs on a ring of n ranks, by formula.

Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel
Distrib. Comput. 69 (2009), and the factors in PERFORMANCE.md of NVIDIA/nccl-tests.
"""


def ring_bytes(call: str, payload: int, n: int, rank: int, root: int | None = None) -> int:
    """Bytes that `rank` (of `n`, in the group) sends when the collective `call` runs on a ring.

    `payload`: bytes of this rank's input: S for all_reduce and broadcast, the own chunk for all_gather and gather,
    all n chunks together for reduce_scatter, all_to_all and the source of a scatter. `root`: the group rank of the
    source or destination, where there is one.
    """
    if n == 1:
        return 0
    if call == "all_reduce":
        return round(2 * (n - 1) * payload / n)  # a reduce-scatter, then an all-gather of the n-th parts
    if call == "all_gather":
        return (n - 1) * payload
    if call in ("reduce_scatter", "all_to_all"):
        return round((n - 1) * payload / n)
    if call == "broadcast":
        return 0 if (rank + 1) % n == root else payload  # the last one on the ring hands nothing on
    if call in ("reduce", "gather"):
        return 0 if rank == root else payload
    if call == "scatter":
        return round((n - 1) * payload / n) if rank == root else 0
    if call == "barrier":
        return 0
    raise ValueError(f"no formula for {call!r}")


def ring_rounds(call: str, n: int) -> int:
    """Messages one after the other until the collective `call` is through a ring of `n` ranks."""
    return (2 if call in ("all_reduce", "barrier") else 1) * (n - 1)
