"""Tensors that are a part of larger ones, which an answer must leave alone around them."""

import torch

from scratch_ddp.course.trial import Trial


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
