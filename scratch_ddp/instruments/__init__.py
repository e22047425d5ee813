"""Instruments: they look at the package's classes and at torch's, and change nothing.

`traffic`: calls, messages and bytes. `timeline`: when each rank computes, waits and communicates. `memory`: what a rank
holds, and a limit on it. `bandwidth`: how long collectives take. `cost`: forecasts by formula. `network`: a simulated
link. `timing` takes times in turns, `forked_ranks` runs a function on real ranks.
"""
