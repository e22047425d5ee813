"""Measurements that the README quotes: `python -m scratch_ddp.benchmark cells`."""
