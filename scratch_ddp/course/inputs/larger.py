"""Tensors that are a part of larger ones, as a slice of a buffer is: what lies beside them is not the answer's."""

import torch

from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits


class Larger:
    """A tensor that holds `part` three times. inside: the second of them, which an answer gets."""

    def __init__(self, part: torch.Tensor):
        self._part = part.flatten()
        self._whole = torch.cat([self._part] * 3)
        self._shape = part.shape
        self.inside = self._whole.view(3, part.numel())[1].view(part.shape)

    def judge(self, trial: Trial, total: torch.Tensor, whose: str = "") -> None:
        """V: the part is the total, every bit of it where it has no NaN. The others are as before."""
        inside = self._whole.view(3, len(self._part))[1].view(self._shape)
        trial.criterion("untouched", self._moved(inside), f"{whose}tensor")
        trial.value(inside, total, f"{whose}tensor", every_bit=not total.isnan().any())
        self.judge_beside(trial, whose)

    def _moved(self, inside: torch.Tensor) -> str:
        """That the tensor which the answer was given is no longer that part, as a complaint."""
        here, there = ((each.data_ptr(), each.shape, each.dtype) for each in (self.inside, inside))
        return "" if here == there else "lies in other memory than before, or has another shape: write into it in place"

    def judge_beside(self, trial: Trial, whose: str = "") -> None:
        """The others are as before. If they are, nothing is said: few answers are thought to change them."""
        for beside in self._whole.view(3, len(self._part))[::2]:
            if bits(beside) != bits(self._part):
                trial.untouched(beside, self._part, f"{whose}larger tensor, beside `tensor`,")


class Fenced:
    """A copy of `part` among sevens, in a larger tensor: as every second element, or transposed, if `case` says so."""

    def __init__(self, part: torch.Tensor, case: str):
        step, turned = 2 if "every second" in case else 1, "transposed" in case
        self._whole = part.new_full((step * (part.numel() + 6),), 7)
        among = self._whole[3 * step : -3 * step : step]
        self.tensor = among.view(part.T.shape).T if turned else among.view(part.shape)
        self.tensor.copy_(part)

    def judge(self, trial: Trial, total: torch.Tensor, whose: str = "") -> None:
        """V and A: it is the total. What lies around it is as before."""
        trial.value(self.tensor, total, f"{whose}tensor")
        if not whose:
            trial.agreement(self.tensor)
        with torch.no_grad():  # the answer may have made it require a gradient
            self.tensor.fill_(7)
        trial.untouched(self._whole, torch.full_like(self._whole, 7), f"{whose}larger tensor, beside `tensor`,")
