"""Rank cells whose ranks run on several hosts.

`%dist_init --hosts 2 -n 2 --listen ADDRESS` opens a door and prints a ticket (`door.py`). On each host
`python -m scratch_ddp.cells.join - <<< TICKET` starts an agent, and the agent the same launcher that a notebook has on
its own machine. It enters through a TLS connection (`tls_channel.py`) when that is ready.

In the kernel a `Host` stands for each agent, and all `Hosts` together take the launcher's place (`host.py`). Whatever a
rank and the kernel say to each other travels over the one connection of their host, also the keys by which the ranks
find each other (`store.py`). What the ranks' process group sends goes from host to host directly, as under torchrun.
"""
