"""What a rank holds: as bars by purpose, as curves over time, element by element."""
