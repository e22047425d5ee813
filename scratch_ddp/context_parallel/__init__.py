"""Context parallelism: each rank holds a part of the sequence, and attention still sees all of it.

    positions    which tokens each rank holds
    ring         keys and values travel round a ring, and each rank adds up its queries' attention
    ulysses      an all-to-all swaps tokens for heads, so that each rank has all tokens of some heads

Everything else in a transformer treats each token by itself, and needs no communication.
"""

from scratch_ddp.context_parallel.positions import contiguous_positions, zigzag_positions
from scratch_ddp.context_parallel.ring import ring_attention, ring_shift
from scratch_ddp.context_parallel.ulysses import ulysses_attention

__all__ = ["contiguous_positions", "ring_attention", "ring_shift", "ulysses_attention", "zigzag_positions"]
