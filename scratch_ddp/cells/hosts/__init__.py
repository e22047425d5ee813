"""Rank cells whose ranks run on several hosts.

`%dist_init --hosts 2 -n 2 --listen ADDRESS` opens a door and prints a ticket (`door.py`). With it the command of
`join.py` enters on each host, through a TLS connection (`tls_channel.py`), and starts the launcher there. All that a
rank and the kernel say to each other travels over the one connection of their host (`host.py`), also the keys by which
ranks find each other (`store.py`). What their process group sends goes from host to host directly, as under torchrun.
"""
