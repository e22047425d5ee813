"""Another default dtype than float32, for answers whose dtype it should not decide."""

from collections.abc import Callable
from typing import Any

import torch


def with_default_float64(answer: Callable, *args: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return answer(*args)
    finally:
        torch.set_default_dtype(before)
