"""What `python3 -m scratch_ddp` does: set up, open the lab, copy, refresh and grade lessons, run the tests."""
