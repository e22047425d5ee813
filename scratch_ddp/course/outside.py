"""Values that leave torch, for numpy, a list or a file: a count of tensors' bytes does not see them there."""

import functools
import threading
from types import TracebackType
from typing import Any

import torch

_WAYS_OUT = ("numpy", "tolist", "item", "__float__", "__int__", "__array__", "__dlpack__", "__reduce_ex__")
FEW = 128  # elements: numbers to look at, and no copy of anything


class LeavingTorch:
    """Counts in `elements` what leaves torch inside the block. `complaint`: "" where that is few.

    The methods of torch.Tensor are replaced meanwhile: a TorchFunctionMode is switched off during backward(), and so in
    its hooks. What other threads do is not counted.
    """

    _active: list["LeavingTorch"] = []

    def __init__(self) -> None:
        self.elements, self.few, self._way = 0, FEW, ""
        self._thread, self._depth = 0, 0

    def __enter__(self) -> "LeavingTorch":
        self._thread = threading.get_ident()
        if not self._active:
            _replace()
        self._active.append(self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._active.remove(self)
        if not self._active:
            _put_back()

    @property
    def complaint(self) -> str:
        return f"takes {self.elements:,} elements out of torch by .{self._way}()" if self.elements > self.few else ""

    @classmethod
    def counted(cls, method: Any, way: str, tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the method. What it calls itself is not counted again."""
        mine = [each for each in cls._active if each._thread == threading.get_ident()]
        for each in mine:
            if not each._depth:
                each.elements, each._way = each.elements + tensor.numel(), each._way or way
            each._depth += 1
        try:
            return method(tensor, *args, **kwargs)
        finally:
            for each in mine:
                each._depth -= 1


_OWN = {way: vars(torch.Tensor)[way] for way in _WAYS_OUT if way in vars(torch.Tensor)}


def _replace() -> None:
    for way in _WAYS_OUT:
        method = getattr(torch.Tensor, way)

        @functools.wraps(method)
        def counted(tensor: torch.Tensor, *args: Any, method: Any = method, way: str = way, **kwargs: Any) -> Any:
            return LeavingTorch.counted(method, way, tensor, args, kwargs)

        setattr(torch.Tensor, way, counted)


def _put_back() -> None:
    for way in _WAYS_OUT:
        if way in _OWN:
            setattr(torch.Tensor, way, _OWN[way])
        else:  # it has it from its base class
            delattr(torch.Tensor, way)
