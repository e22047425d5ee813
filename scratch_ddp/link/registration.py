"""Making a group known to torch.distributed, as `new_group` does for those that it makes."""

import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group


def register(
    group: dist.ProcessGroup, name: str, ranks: list[int], backend: str, backend_config: str, store: dist.Store
) -> None:
    """Enter `group` into torch's tables: `ranks` are the global numbers of its ranks, in their order in the group."""
    world = dist.distributed_c10d._world
    group._set_group_name(name)
    _register_process_group(name, group)
    world.pg_map[group] = (dist.Backend(backend), store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = backend_config
    world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    tag = f"ptd:{name}"
    world.pg_to_tag[group] = tag
    for each in ("", tag):
        world.tags_to_pg.setdefault(each, []).append(group)


def unregister(group: dist.ProcessGroup) -> None:
    """Take `group` out of torch's tables again; nothing happens if it is in none."""
    world = dist.distributed_c10d._world
    if group not in world.pg_map:
        return
    for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    for each in ("", tag):
        if group in world.tags_to_pg.get(each, []):
            world.tags_to_pg[each].remove(group)
    _unregister_process_group(world.pg_names.pop(group))


def free_name(stem: str) -> str:
    """A name that no group has: the stem and a number."""
    taken = set(dist.distributed_c10d._world.pg_names.values())
    return next(name for number in range(len(taken) + 1) if (name := f"{stem} {number}") not in taken)


def make_default(group: dist.ProcessGroup) -> None:
    """Let a registered group be the default one."""
    dist.distributed_c10d._update_default_pg(group)
