"""A network on one machine: process groups whose operations take the time that a link would take.

`linked_group` puts the ranks of a process group on a link, `lone_rank` lets one process stand for one rank of n. In
both, a collective or message takes α + bytes·β seconds, transfers queue at each rank as at a network card, and waiting
for them uses no processor.
"""

from scratch_ddp.link.group import LinkedGroup
from scratch_ddp.link.linked import linked_group
from scratch_ddp.link.links import Link
from scratch_ddp.link.lone import lone_rank
from scratch_ddp.link.nic import Transfer
from scratch_ddp.link.presets import PRESETS, preset

__all__ = ["PRESETS", "Link", "LinkedGroup", "Transfer", "linked_group", "lone_rank", "preset"]
