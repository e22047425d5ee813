"""What lessons import besides the ideas: layers that sleep, planted faults, observed loops, measured layouts."""
