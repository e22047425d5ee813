"""Rank cells on one host and on two, measured from outside through a kernel."""
