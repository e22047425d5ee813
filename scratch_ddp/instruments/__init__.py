"""Instruments: they look at the package's classes and at torch's, and change nothing."""
