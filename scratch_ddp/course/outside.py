"""Values that leave torch, for numpy, a list or a file: a count of tensors' bytes does not see them there."""

import functools
import threading
from types import TracebackType
from typing import Any

import torch

_WRAPPING = ("frombuffer", "from_numpy", "from_dlpack", "as_tensor", "asarray")  # others' memory in a tensor
_WAYS_OUT = ("numpy", "tolist", "item", "__float__", "__int__", "__array__", "__dlpack__", "__reduce_ex__")
FEW = 128  # elements: numbers to look at, and no copy of anything


class LeavingTorch:
    """Counts in `elements` what leaves torch inside the block. `complaint`: "" where that is few.

    A tensor around memory that is not torch's own is a way out, too. The methods of torch.Tensor and these functions
    are replaced meanwhile: a TorchFunctionMode is switched off during backward(), and so in its hooks. What other
    threads do is not counted.
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
        return f"takes {self.elements:,} elements out of torch by {self._way}()" if self.elements > self.few else ""

    @classmethod
    def counted(cls, method: Any, way: str, tensor: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the method. What it calls itself is not counted again."""
        mine = cls._count(f".{way}", tensor)
        for each in mine:
            each._depth += 1
        try:
            return method(tensor, *args, **kwargs)
        finally:
            for each in mine:
                each._depth -= 1

    @classmethod
    def _count(cls, way: str, tensor: torch.Tensor) -> list["LeavingTorch"]:
        """Return who counts in this thread."""
        mine = [each for each in cls._active if each._thread == threading.get_ident()]
        for each in mine:
            if not each._depth:
                each.elements, each._way = each.elements + tensor.numel(), each._way or way
        return mine

    @classmethod
    def wrapped(cls, function: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What one of the functions returns, counted if it lies in memory that is not torch's own."""
        tensor = function(*args, **kwargs)
        given_tensor = bool(args) and isinstance(args[0], torch.Tensor)
        if tensor.layout is torch.strided and not given_tensor and not tensor.untyped_storage().resizable():
            cls._count(f"torch.{function.__name__}", tensor)
        return tensor


_OWN_WRAPPING = {name: getattr(torch, name) for name in _WRAPPING}
_OWN = {way: vars(torch.Tensor)[way] for way in _WAYS_OUT if way in vars(torch.Tensor)}


def _replace() -> None:
    for way in _WAYS_OUT:
        method = getattr(torch.Tensor, way)

        @functools.wraps(method)
        def counted(tensor: torch.Tensor, *args: Any, method: Any = method, way: str = way, **kwargs: Any) -> Any:
            return LeavingTorch.counted(method, way, tensor, args, kwargs)

        setattr(torch.Tensor, way, counted)
    for name, function in _OWN_WRAPPING.items():
        setattr(torch, name, functools.wraps(function)(functools.partial(LeavingTorch.wrapped, function)))


def _put_back() -> None:
    for way in _WAYS_OUT:
        if way in _OWN:
            setattr(torch.Tensor, way, _OWN[way])
        else:  # it has it from its base class
            delattr(torch.Tensor, way)
    for name, function in _OWN_WRAPPING.items():
        setattr(torch, name, function)
