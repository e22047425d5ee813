"""Instruments: they look at the package's classes and at torch's, and change nothing.

`traffic`: count calls, messages and bytes. `timeline`: when each rank computes, waits and communicates. `memory`: what
a rank holds, and a limit on it. `bandwidth`: how long collectives take. `cost`: forecasts by formula. `network`: a
simulated link. Beside them: `timing` takes times in turns, `forked_ranks` runs a function on real ranks, and
`intervals`, `profiler` and `sizes` are what these share.
"""
