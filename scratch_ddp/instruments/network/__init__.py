"""A simulated network on one machine: process groups whose operations take as long as they would on a real link.

`linked_group()` puts the ranks of a process group on a link. `lone_rank()` lets one process stand for one rank of n. In
both, a collective or message takes α + bytes·β seconds, transfers queue at each rank as at a network card, and waiting
uses no processor time. `PRESETS` are links with names and sources, such as "NVLink 4". With `hosts`, ranks of one host
share a network card; `linked_mesh()` has a group for each level.
"""

from scratch_ddp.instruments.cost.wire import PRESETS, Link, preset
from scratch_ddp.instruments.network.linked import LinkedGroup, linked_group, linked_mesh
from scratch_ddp.instruments.network.lone import lone_rank
from scratch_ddp.instruments.network.nic import Transfer

__all__ = ["PRESETS", "Link", "LinkedGroup", "Transfer", "linked_group", "linked_mesh", "lone_rank", "preset"]
