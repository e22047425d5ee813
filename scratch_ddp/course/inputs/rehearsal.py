"""An operation to be timed and a clock, of which every second is known."""

import inspect
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode, resolve_name

from scratch_ddp.course.guard import settings
from scratch_ddp.instruments.traffic.calls import Call


class Rehearsal:
    """An operation and a clock of which every second is known, and a record of what was done when.

    begins: what the clock shows when the first call that counts begins. error: raised by call number `failing`.
    look: the seconds that a look at the clock takes, after it was read.
    """

    def __init__(
        self,
        begins: float,
        seconds: list[float],
        met: Callable,
        error: BaseException | None = None,
        failing: int = 0,
        look: float = 0.0,
    ):
        self._now, self._seconds, self._met = begins - seconds[0], iter(seconds), met
        self._error, self._failing, self.fails, self._look = error, failing, error is not None, look
        self._events: list[tuple[str, Any]] = []  # ("call" or "look", which collectives were called and ended before)
        self._may_run: bool | None = True  # anything, but for operation(); None: operation() runs
        self._beside: list[str] = []  # what ran between a look and operation()
        self._results = torch.ones(2), _Handle(self._note_tensors)
        self._steps = 0  # how much ran there
        self._jumps = 0  # how often it went back, as a loop does
        self.settings = self.between = ""  # what is wrong with the settings of the process, and what ran in between
        self._late = ""  # which call on the clock begins some time after its barrier

    def run(self, answer: Callable, repeats: int, device: torch.device) -> object:
        self._events.clear()
        self._before = _all_settings()
        times = answer(self._operation, repeats, self._clock, device)
        self._compare(_all_settings(), "leaves")
        return times

    def watched(self, answer: Callable, repeats: int, device: torch.device) -> object:
        """`run`, and note what is called between the looks at the clock beside operation()."""
        profile, trace = sys.getprofile(), sys.gettrace()
        place = getattr(getattr(inspect.unwrap(answer), "__code__", None), "co_filename", "")

        def trace_calls(frame: FrameType, event: str, _: Any) -> Callable | None:
            if frame.f_code.co_filename != place:
                return None
            frame.f_trace_opcodes = True
            return self._jumps_noticed()

        sys.setprofile(self._note_function)
        sys.settrace(trace_calls)
        try:
            with _Tensors(self._note_tensors):
                return self.run(answer, repeats, device)
        finally:
            sys.settrace(trace)
            sys.setprofile(profile)

    def raises(self, answer: Callable, repeats: int, device: torch.device) -> str:
        """What is wrong with the end of a call in which the operation raises; "" if that reaches the caller."""
        try:
            self.run(answer, repeats, device)
        except type(self._error) as error:
            return "" if error is self._error else f"raised another {type(error).__name__} than operation() did"
        return f"returned, should raise {type(self._error).__name__}"

    def _operation(self) -> torch.Tensor:
        """Returns a tensor or a handle, with which nothing may be done before the next look at the clock."""
        self._may_run = None
        self._note("call")
        self._now += next(self._seconds, 1.0)
        self._compare(_all_settings(), "calls operation() with")
        if self._error and self.calls() == self._failing:
            self._may_run = True
            raise self._error
        self._may_run = False
        return self._results[self.calls() % 2]

    def _clock(self) -> float:
        self._may_run = None
        self._note("look")
        shown, self._now = self._now, self._now + self._look
        self._may_run = False
        return shown

    def _note(self, what: str) -> None:
        self._events.append((what, self._met()))
        counts = self.calls() - (what == "call")  # calls before this moment, of which the first is not in the list
        if self._beside and counts and (what == "call" or self._events[-2:-1] and self._events[-2][0] == "call"):
            number = counts if what == "call" else counts - 1
            if number:
                self.between = self.between or f"of call {number} on the clock has {self._beside[0]} in it"
        self._beside.clear()
        self._steps = self._jumps = 0

    def _note_function(self, frame: FrameType, event: str, function: Any) -> None:
        """Functions that compute, print or wait; looking something up or appending to a list takes no time."""
        if self._may_run is not False:
            return
        self._steps += 1
        if self._steps == 100:
            self._beside.append(f"{frame.f_code.co_name.strip('<>')}()")
        if event != "c_call":
            return
        owner = getattr(function, "__self__", None)
        module = getattr(owner, "__module__", None) or type(owner).__module__
        name = function.__name__
        if name == "sleep" and self._events and self._met()[-1] > self._events[-1][1][-1]:
            self._late = self._late or f"of call {self.calls()} on the clock begins after a sleep behind its barrier"
        if module.split(".")[0] == "torch" or name in ("print", "sleep", "collect"):
            self._beside.append(f"{name}()")

    def _note_tensors(self, name: str) -> None:
        """Also what is written without a function's name, such as `taken[i] = …`."""
        if self._may_run is False:
            self._beside.append(f"{name}()")

    def _jumps_noticed(self) -> Callable:
        """A trace function for one frame. What it sees more than once between two looks is a loop."""
        reached = -1

        def note(frame: FrameType, event: str, _: Any) -> Callable:
            nonlocal reached
            if event == "opcode":
                if self._may_run is False and frame.f_lasti < reached:
                    self._jumps += 1
                    if self._jumps == 2:
                        self._beside.append(f"a loop (line {frame.f_lineno})")
                reached = frame.f_lasti
            return note

        return note

    def _compare(self, now: dict[str, object], what: str) -> None:
        for name, value in now.items():
            if value != self._before[name] and not self.settings:
                told = ("switched off", "switched on")[value] if isinstance(value, bool) else f"set to {value}"
                self.settings = f"{what} {name} {told}"

    def calls(self) -> int:
        return sum(what == "call" for what, _ in self._events)

    def apart(self) -> str:
        """In what call the ranks don't begin together, as a complaint; "" if they always do, but for the first."""
        number, last_call, last_look, before = 0, None, None, ""
        for what, met in self._events:
            if what == "look":
                if before == "call" and number > 1 and met != last_call:
                    return f"of call {number - 1} on the clock has the barrier in it"
                last_look = met
            else:
                if number and last_look is not None and met != last_look:
                    return f"of call {number} on the clock has the barrier in it"
                if number and (last_look is None or last_look[0] <= last_call[0]):
                    return f"of call {number} on the clock does not begin with a barrier"
                if number and last_look[-1] <= last_call[-1]:
                    return f"of call {number} on the clock begins before its barrier has ended"
                last_call, number = met, number + 1
            before = what
        return self._late


def _all_settings() -> dict[str, object]:
    return settings() | {"the filters of warnings": list(warnings.filters)}


class _Tensors(TorchFunctionMode):
    """Says what is done with tensors inside the block: by which function of torch."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__()
        self._note = note

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if name := resolve_name(func):  # none for what only changes a setting
            self._note(name)
        return func(*args, **(kwargs or {}))


class _Handle(dist.Work):
    """As a collective with async_op=True returns it: who waits for it times something else."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__()
        self._note = note

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._note("wait")
        return True


class Collectives:
    """Counts the collectives of this rank: how many were called, and how many have ended for it."""

    def __init__(self) -> None:
        self.called = self.ended = 0

    def started(self, call: Call) -> None:
        self.called += 1

    def waited(self, call: Call) -> None:
        self.ended += 1

    def __call__(self) -> tuple[int, int]:
        return self.called, self.ended


def met_in_one_process() -> tuple[int]:
    return (sum(dist.group.WORLD.counts.calls.values()),)
