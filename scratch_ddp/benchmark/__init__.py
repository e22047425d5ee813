"""Measurements: `python -m scratch_ddp.benchmark --help`, and what notebooks take from it."""
