"""What the interruptible process group of rank cells costs, beside plain gloo."""

import json

from scratch_ddp.benchmark.kernel import Kernel
from scratch_ddp.benchmark.report import Figure

_MEASURE = """
import json
import statistics
import time

plain = dist.new_group(backend="gloo")


def seconds_a_call(group, tensor, calls):
    dist.barrier(group=plain)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(tensor, group=group)
    return (time.perf_counter() - began) / calls


found = {}
for size, calls in ((4, 200), (2**20, 40), (2**23, 10)):
    tensor = torch.zeros(size // 4)
    pairs = [(seconds_a_call(None, tensor, calls), seconds_a_call(plain, tensor, calls)) for _ in range(7)]
    found[size] = [statistics.median(watched / other for watched, other in pairs), *map(statistics.median, zip(*pairs))]
if rank == 0:
    print(json.dumps(found))
"""


def watched_group() -> list[Figure]:
    """all_reduce in the group of rank cells and in a plain one, interleaved in one run, 2 ranks."""
    with Kernel(cluster=2) as kernel:
        result = kernel.run(_MEASURE, timeout=120)
        assert not result.error, result.traceback
        found = json.loads(result.text().split("   ←")[0])
    figures = []
    for size, (ratio, watched, plain) in found.items():
        small = int(size) < 2**20
        what = f"all_reduce of {int(size):,} bytes / plain gloo's, 2 ranks"
        text = f"{ratio:.2f} × ({watched * 1e3:.2f} ms against {plain * 1e3:.2f} ms)"
        figures.append(Figure(what, "said" if small else "≤ 1.2", text, small or ratio <= 1.2))
    return figures
