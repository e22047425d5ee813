import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that tests find their helpers (`from ranks import run_ranks`)

# Ranks are forked from the test process: it must not have started a pool of threads before.
torch.set_num_threads(1)
