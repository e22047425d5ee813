"""A simulated network on one machine: process groups whose operations take as long as they would on a real link."""

from scratch_ddp.instruments.cost.wire import PRESETS, Link, preset
from scratch_ddp.instruments.network.linked import LinkedGroup, linked_group, linked_mesh, lone_rank
from scratch_ddp.instruments.network.nic import Transfer

__all__ = ["PRESETS", "Link", "LinkedGroup", "Transfer", "linked_group", "linked_mesh", "lone_rank", "preset"]
