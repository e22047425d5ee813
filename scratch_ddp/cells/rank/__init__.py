"""Runs in each rank. Nothing here imports `kernel/`."""
