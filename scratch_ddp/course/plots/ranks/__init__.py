"""What ranks hold, compute and send to each other."""
