"""Runs in the notebook's kernel. Nothing here imports `rank/`, and torch is not imported."""
