"""Values that leave torch, for numpy, a list or a file: a count of tensors' bytes does not see them there."""

import torch
from torch.overrides import TorchFunctionMode

_WAYS_OUT = {
    getattr(torch.Tensor, name): name
    for name in ("numpy", "tolist", "item", "__float__", "__int__", "__array__", "__dlpack__", "__reduce_ex__")
}
FEW = 128  # elements: numbers to look at, and no copy of anything


class LeavingTorch(TorchFunctionMode):
    """Counts in `elements` what leaves torch inside the block. `complaint`: "" where that is few."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.few, self._way = 0, FEW, ""

    @property
    def complaint(self) -> str:
        return f"takes {self.elements:,} elements out of torch by .{self._way}()" if self.elements > self.few else ""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if (way := _WAYS_OUT.get(func)) is not None:
            self.elements, self._way = self.elements + args[0].numel(), self._way or way
        return func(*args, **(kwargs or {}))
