"""A tensor that is a part of a larger one, as a slice of a buffer is: what lies beside it is not the answer's."""

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
