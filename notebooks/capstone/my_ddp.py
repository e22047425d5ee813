"""Your own data-parallel class, `MyDDP(model)`: see capstone.md."""
