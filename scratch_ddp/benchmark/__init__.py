"""The benchmarks: `python -m scratch_ddp.benchmark --help`. They print the README's tables; nothing imports them."""
