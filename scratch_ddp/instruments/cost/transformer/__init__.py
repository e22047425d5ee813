"""A transformer before it exists: its sizes, and what a token of it takes."""
