"""Who has sent how much to whom, from what the ranks' ends of simulated links carried."""

from collections import Counter

import torch.distributed as dist

from scratch_ddp.instruments.network import LinkedGroup


def sent_over_rings(*groups: LinkedGroup) -> dict[tuple[int, int], int]:
    """{(source, destination): bytes} of all collectives in these groups so far, each of which ran on a ring.

    Every rank calls it, and gets those of all ranks. Costs an object all-gather in the default group.
    """
    mine: Counter[tuple[int, int]] = Counter()
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        successor = ranks[(group.rank() + 1) % len(ranks)]
        mine[dist.get_rank(), successor] += sum(transfer.nbytes for transfer in group.transfers)
    everyones: list[dict | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, dict(mine))
    return {edge: nbytes for each in everyones for edge, nbytes in each.items()}
