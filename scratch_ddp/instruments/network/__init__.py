"""A simulated network on one machine: process groups whose operations take as long as they would on a real link.

`linked_group()` puts the ranks of a process group on a link, `lone_rank()` lets one process stand for one rank of n. A
collective or message then takes α + bytes·β seconds, and transfers queue at each rank as at a network card. `PRESETS`
are links such as "NVLink 4". With `hosts`, ranks share a network card; `linked_mesh()` has a group for each level.
"""

from scratch_ddp.instruments.cost.wire import PRESETS, Link, preset
from scratch_ddp.instruments.network.linked import LinkedGroup, linked_group, linked_mesh
from scratch_ddp.instruments.network.lone import lone_rank
from scratch_ddp.instruments.network.nic import Transfer

__all__ = ["PRESETS", "Link", "LinkedGroup", "Transfer", "linked_group", "linked_mesh", "lone_rank", "preset"]
