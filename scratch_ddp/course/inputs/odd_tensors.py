"""A model with every kind of tensor that real models hold, for inputs on which whole classes of mistakes show.

An answer can be right for vectors of float32 and wrong for numbers without dimensions, empty or transposed tensors, for
other dtypes, for numbers near the ends of what a dtype holds, for NaN and inf, frozen, tied or unused parameters.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn

_PLAIN, _LARGE, _TINY = "plain", "large", "tiny"
_DIFFERENT = 997  # numbers; a longer tensor repeats them, since making them takes time


@dataclass(frozen=True)
class _Kind:
    """A parameter's shape and dtype, and how large its gradients are for that dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    gradients: str = _PLAIN


_KINDS = {
    "vector": _Kind((3,)),
    "cube": _Kind((2, 1, 3)),
    "scalar": _Kind(()),
    "empty": _Kind((0, 3)),
    "transposed": _Kind((3, 2)),
    "infinite": _Kind((4,)),  # in the weights and in the gradients
    "large_half": _Kind((2,), torch.float16, _LARGE),
    "tiny_half": _Kind((2,), torch.float16, _TINY),
    "large": _Kind((2,), gradients=_LARGE),
    "tiny": _Kind((2,), gradients=_TINY),
    "large_double": _Kind((2,), torch.float64, _LARGE),
    "large_bf16": _Kind((2,), torch.bfloat16, _LARGE),
    "large_complex": _Kind((2,), torch.complex64, _LARGE),
    "large_complex_double": _Kind((2,), torch.complex128, _LARGE),
}


class OddModel(nn.Module):
    """The same values on all ranks. Buffers, a tied parameter, a part in eval mode; two frozen parameters.

    frozen: with those two, one of which still has a gradient. dtypes: only parameters of these, if given.
    """

    def __init__(self, device: torch.device, dtypes: tuple[torch.dtype, ...] = (), frozen: bool = True):
        super().__init__()
        for name, kind in _KINDS.items():
            if not dtypes or kind.dtype in dtypes:
                self.register_parameter(name, nn.Parameter(_weights(name, kind)))
        self.inner, self.head = nn.Linear(2, 2, bias=False).eval(), nn.Linear(2, 2)
        self.head.weight = self.inner.weight
        if frozen:
            self.frozen, self.frozen_2 = (nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2))
            self.frozen.grad = torch.full((3,), 7.0)  # from before it was frozen
        self.register_buffer("mean", torch.tensor([-0.0, 0.5]))
        self.register_buffer("steps", torch.tensor(2**60 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)
        with torch.no_grad():
            for layer in (self.head.weight, self.head.bias):
                layer.fill_(0.5)
        self.to(device)

    def trainable(self) -> dict[str, nn.Parameter]:
        """By name, a tied one once."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def gradient_of(name: str, parameter: nn.Parameter, rank: int, size: int, step: int = 0) -> torch.Tensor:
    """Rank `rank`'s gradient of a parameter of `OddModel`, or of another model: exact when divided by `size`.

    Each step has other values, and so have most names. Two large ones are more than the dtype can hold; tiny ones are 0
    in the next smaller dtype. Those of `infinite` hold NaN, inf and -inf on the last rank.
    """
    return _like(parameter, _numbers(name, parameter, rank, size, step))


def combined(name: str, parameter: nn.Parameter, parts: list[int], total: int, step: int = 0) -> torch.Tensor:
    """What one process computes: the sum of all ranks' gradients, each times its part / total. 0 leaves a rank out."""
    terms = [
        [number / total * part for number in _numbers(name, parameter, rank, len(parts), step)]
        for rank, part in enumerate(parts)
        if part
    ]
    return _like(parameter, [sum(numbers) for numbers in zip(*terms, strict=True)] or [0.0])


def _numbers(name: str, parameter: nn.Parameter, rank: int, size: int, step: int) -> list[complex]:
    """Python's numbers, since every operation of torch is observed during a check."""
    kind, count = _KINDS.get(name, _Kind(())), min(parameter.numel(), _DIFFERENT)
    real = parameter.dtype.to_real() if parameter.is_complex() else parameter.dtype
    unit, factor = math.lcm(12, size), (rank + 1) ** 2 * (1 + sum(name.encode()) % 3) * (-1) ** step
    numbers = [unit * factor * place for place in range(1, count + 1)]
    if kind.gradients == _LARGE:
        numbers = [(-1) ** step * unit * 2.0 ** int(math.log2(torch.finfo(real).max / unit))] * count
    elif kind.gradients == _TINY:
        scale = {torch.float16: 2.0**-20, torch.float64: 2.0**-800}.get(real, 2.0**-100)
        numbers = [number * scale for number in numbers]
    if name == "infinite":
        numbers[:3] = [math.nan, math.inf, -math.inf] if rank == size - 1 else numbers[:3]
    return [complex(number / 2, -number) for number in numbers] if parameter.is_complex() else numbers


def _like(parameter: nn.Parameter, numbers: list[complex]) -> torch.Tensor:
    """Also in memory, where a transposed one lies in another order."""
    flat = torch.tensor(numbers, dtype=parameter.dtype, device=parameter.device)
    if 0 < len(flat) < parameter.numel():
        flat = flat.repeat(-(-parameter.numel() // len(flat)))
    return torch.empty_like(parameter, requires_grad=False).copy_(flat[: parameter.numel()].view(parameter.shape))


def _weights(name: str, kind: _Kind) -> torch.Tensor:
    if name == "transposed":
        return torch.arange(6.0).view(2, 3).t()
    if name == "infinite":
        return torch.tensor([torch.inf, -torch.inf, torch.nan, 0.5])
    return torch.full(kind.shape, 0.5, dtype=kind.dtype)
