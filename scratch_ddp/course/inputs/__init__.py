"""Recorded runs that lessons show: what needs root, several machines or many minutes. Each file says how."""
