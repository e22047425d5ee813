"""What takes time: the lanes of ranks, and seconds by size."""
