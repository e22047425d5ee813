"""Rank cells whose ranks run on several hosts.

`%dist_init --hosts 2 -n 2 --listen ADDRESS` opens a door and prints a ticket (`door.py`). With it the command of
`join.py` enters on each host, through a TLS connection (`tls_channel.py`), and starts the launcher there.

In the kernel a `Host` stands for each agent, and all `Hosts` together take the launcher's place (`host.py`). Whatever a
rank and the kernel say to each other travels over the one connection of their host, also the keys by which the ranks
find each other (`store.py`). What the ranks' process group sends goes from host to host directly, as under torchrun.
"""
