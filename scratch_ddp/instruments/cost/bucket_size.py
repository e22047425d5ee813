r"""The best bucket size: by a formula, and by trying sizes on a backward's timeline.

Let n bytes of gradients arrive evenly over a backward of $T_b$ seconds and be sent in n/b buckets of b bytes, each of
which takes $s = \alpha + \beta b$ on the wire. A bucket is full every $p = T_b\,b/n$ seconds.

* If the wire keeps up ($s \le p$), all but the last bucket is hidden: $U(b) = \alpha + \beta b$.
* If it does not, it is busy from the first full bucket on. By T = α·P + β·n it ends at $p + \alpha n/b + \beta n$, so
  $U(b) = T_b\,b/n + \alpha n/b + \beta n - T_b$.

U, the exposed communication, is the larger of the two. The second is smallest where its derivative
$T_b/n - \alpha n/b^2$ is 0, at $b = n\sqrt{\alpha/T_b}$. (If wire and compute are in balance, $T_b = \beta n$, that is
$\sqrt{\alpha n/\beta}$.) Beyond the size at which the wire just keeps up, $s = p$ at $b = \alpha/(T_b/n - \beta)$,
larger buckets only lengthen the tail. So the best size is the smaller of the two, and never more than n.
"""

import math

from scratch_ddp.common.tensors import MB
from scratch_ddp.ddp.bucketed import FIRST_BUCKET_MB
from scratch_ddp.instruments.cost.steps import Backward, Forecast, bucketed
from scratch_ddp.instruments.cost.wire import Wire

_SIZES_PER_DOUBLING = 4  # that the search tries


def best_bucket_bytes(wire: Wire, nbytes: float, seconds: float) -> float:
    """The best bucket size in bytes by the formula above, for `nbytes` of gradients in a backward of `seconds`.

    Assumes that gradients arrive evenly and can be cut anywhere, and that the first bucket is as large as the others.
    It is 0 where a message costs nothing but its bytes: the smaller the better.
    """
    alpha, beta = wire.alpha_of_all_reduce, wire.beta_of_all_reduce
    if alpha == 0 or nbytes == 0:
        return 0.0
    if seconds == 0:
        return float(nbytes)
    least_overhead = nbytes * math.sqrt(alpha / seconds)
    spare = seconds / nbytes - beta  # seconds of compute per byte, minus its seconds on the wire
    just_keeps_up = alpha / spare if spare > 0 else math.inf
    return min(least_overhead, just_keeps_up, float(nbytes))


def best_bucket(backward: Backward, wire: Wire, first_mb: float = FIRST_BUCKET_MB) -> tuple[float, Forecast]:
    """Find the best bucket size in MB (of 2²⁰ bytes) on this timeline by trying sizes; return it with its forecast.

    Sizes from the smallest gradient to all gradients are tried, four per doubling. Of the sizes whose steps are within
    a thousandth of the best, the largest is taken: each message costs the processor something that the forecast leaves
    out. Raises ValueError for a backward without gradients.
    """
    sizes = [size for size in backward.nbytes if size]
    if not sizes:
        raise ValueError("there is no gradient to put into buckets")
    doublings = math.log2(backward.total_bytes / min(sizes))
    tried = [min(sizes) * 2 ** (i / _SIZES_PER_DOUBLING) for i in range(int(doublings * _SIZES_PER_DOUBLING) + 1)]
    candidates = [(size / MB, bucketed(backward, wire, size / MB, first_mb)) for size in [*tried, backward.total_bytes]]
    least = min(forecast.step for _, forecast in candidates)
    return next((size, forecast) for size, forecast in reversed(candidates) if forecast.step <= 1.001 * least)
