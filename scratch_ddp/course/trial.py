"""What the test of an exercise is written with: call the learner's function, then state criteria.

All ranks call the same methods in the same order, whatever a rank has found: `call`, `cost` and `verdict` exchange
facts among the ranks. A test hands the function's results to the methods below and does not look into them itself.
"""

import contextlib
import functools
import hashlib
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from scratch_ddp.common.agreement import message_device
from scratch_ddp.course.attempt import MessageLog, Outcome, attempt, in_short, left_over_in_a_part, limit_anew
from scratch_ddp.course.budget import exceeded
from scratch_ddp.course.freed_memory import FreedMemoryRefused
from scratch_ddp.course.guard import Guard
from scratch_ddp.course.meeting import GRACE, Meeting, RanksMissing, as_text, from_text
from scratch_ddp.course.message_sizes import message_sizes_compared
from scratch_ddp.course.outside import LeavingTorch
from scratch_ddp.course.verdict import Verdict, fault, merge, prints
from scratch_ddp.course.wording import bits, difference, difference_in_bits, ranks
from scratch_ddp.course.worlds import World, all_ranks
from scratch_ddp.instruments.memory.ledger import MemoryLedger
from scratch_ddp.instruments.traffic import Counted, Totals, traffic
from scratch_ddp.instruments.traffic.intercept import listening

LONG_PATIENCE = 200  # milliseconds that gloo's threads get to release tensors, before an answer is said to hold them


class AnswerFailed(Exception):
    """The answer can't be examined further. Raised on every rank."""


@dataclass
class _Part:
    """One of the cases of a call: what was sent in it."""

    case: str
    log: MessageLog
    counted: Counted | None = None

    def as_fact(self) -> dict[str, Any]:
        return {"case": self.case, "log": self.log.as_fact(), "counted": as_text(self.counted.report())}


class Trial:
    """The examination of one answer in one world (see `worlds`): all ranks, or some of them.

    rank, size: of this rank in that world. on_all_ranks: it is the world of all ranks, which comes first. place: how
    complaints name it; a test may change it. seed: for inputs that are drawn; the same on all ranks, another in each
    run. device: where the tensors of the test live.
    printed: the first lines that the last call printed on this rank; line_ended: they end with a line break. calls:
    what the last call started on this rank, as `traffic` describes it. spoiled: the process group can't be trusted any
    more. ranks_missing: some rank did not even come back to say how its call ended.
    """

    def __init__(self, function: Callable, meeting: Meeting, seconds: float, seed: int = 0, world: World | None = None):
        self.rank, self.size, self.device = meeting.rank, meeting.size, message_device()
        self.printed: list[str] = []
        self.line_ended, self.calls = True, []
        self.spoiled = self.ranks_missing = False
        self._function, self._meeting, self._seconds = function, meeting, seconds
        self.seed, self._world = seed, world or all_ranks()
        self.on_all_ranks, self.place = world is None, self._world.place
        self._case, self._calls, self._hint = "", 0, ""
        self._parts: list[_Part] = []  # of the last call
        self._reports_of_parts: list[list[str]] = []  # by rank
        # Criterion -> (in which call, this rank's first complaint), "" if there is none.
        self._found: dict[str, tuple[int, str]] = {}
        self._shared: dict[str, str] = {}  # criterion -> complaint, for what all ranks have found together
        self._fatal: dict[str, str] = {}  # what ended the examination
        self._digests: list[tuple[str, str]] = []
        self._printed: list[list[dict]] = []
        self._reports: list[str] = []  # what each rank counted in the last call
        self._all_stumbled = False
        self._not_waited = False  # some rank has not waited for a message: then ranks may go different ways
        self._made_by: dict[str, str] = {}  # by which of torch's functions its calls were made, if not by the answer

    def generator(self) -> torch.Generator:
        """For inputs that all ranks draw alike, and another run draws differently. Name the seed in the case."""
        return torch.Generator().manual_seed(self.seed)

    def peer(self, rank: int) -> int:
        """The number under which the answer knows rank `rank` of this world: for arguments such as `src`."""
        return self._world.members[rank]

    def call(
        self,
        *args: Any,
        case: str = "",
        changes: Collection[Any] = (),
        beside: Collection[Any] | Mapping[str, Any] = (),
        may_print: bool = False,
        raises: str = "",
        using: Callable | None = None,
    ) -> Any:
        """Call the answer on all ranks and return this rank's result. Complaints begin with `case`, what was asked.

        changes: what the answer may change of its arguments and of `beside` (other objects that it knows, perhaps by
        name), as in `Guard`; everything else is compared. may_print: printing is its task; the lines are in `printed`
        and are not shown. raises: the error that it must raise, on every rank. using: called as using(answer, *args) in
        place of answer(*args), for an answer whose result must be used as well, such as a context manager. Raises
        AnswerFailed, on every rank, if on any rank the answer raised, did not end, or left messages behind.
        """
        self._end_if_not_waited()
        self._begin(case)
        log, self._parts = MessageLog(self._world.members), []
        answer = self._function if self._world.group is None else _with_group(self._function, self._world.group)
        also = beside if isinstance(beside, Mapping) else _numbered(beside, len(args))
        guard = Guard(self._function, self._by_name(args) | also, changes)
        place = f"{self._meeting.name}/call {self._calls}"
        sizes = message_sizes_compared(self._meeting.store, place, lambda: len(self._parts))
        with guard, traffic() as counted, listening(log), sizes as of_threads:  # looking at the arguments is no traffic
            result, outcome = attempt(
                answer if using is None else functools.partial(using, answer), args, self._seconds
            )
        self.printed, self.line_ended, self.calls = outcome.printed, outcome.line_ended, log.calls
        if raises:
            outcome = self._expected_error(outcome, raises)
        outcome.error = guard.explained(outcome.error)
        facts = self._exchange(
            {
                "case": self._case,
                "outcome": outcome.as_fact(),
                "log": log.as_fact(),
                "counted": as_text(counted.report()),
                "parts": [part.as_fact() for part in self._parts],
                "destroyed": not dist.is_initialized(),
                "never waited for": log.never_waited_for,
                "of threads": next(iter(of_threads), ""),
            }
        )
        self._reports = [fact["counted"] for fact in facts]
        self._reports_of_parts = [[part["counted"] for part in fact["parts"]] for fact in facts]
        self._made_by = {name: maker for fact in facts for name, maker in fact["log"]["made_by"].items()}
        outcomes = [fact["outcome"] for fact in facts]
        if not may_print:
            self._printed.append(outcomes)
        behind, part = left_over_in_a_part(facts)
        self._not_waited = any(fact["never waited for"] for fact in facts)
        if wrong := fault(outcomes, self._seconds):
            self._case = part or next(fact["case"] for fact in facts if fact["outcome"]["how"] != "returned")
            stuck = any(each["how"] == "unfinished" for each in outcomes)
            self.spoiled = bool(behind) or stuck or self._not_waited
            self._give_up_for("runs", [fact["of threads"] for fact in facts])
            self._give_up_for("group", [fact["log"]["elsewhere"] for fact in facts])
            if any(each["how"] == "raised" for each in outcomes):  # the call that raised was not made: counts mislead
                behind = ""
            self._give_up("runs", " ".join(filter(None, [wrong, behind if stuck else ""])))
        self._give_up_for("runs", [fact["of threads"] for fact in facts])
        if any(fact["destroyed"] for fact in facts):
            self._give_up("group", "The default process group is gone after the call.")
        self.spoiled |= bool(behind)
        self._give_up_for("group", [fact["log"]["elsewhere"] for fact in facts])
        if behind:
            self._case = part or self._case
            self._give_up("group", f"{behind} A later cell would take what is left for its own.")
        if log.never_waited_for and attempt(log.finish, (), self._seconds)[1].how != "returned":
            self.spoiled = True
        changed = guard.complaint or outcome.left_changed
        for name, complaint in {"untouched": changed, "waits": log.never_waited_for}.items():
            if complaint:
                self.criterion(name, complaint)
        return result

    @contextlib.contextmanager
    def part(self, case: str) -> Iterator[None]:
        """Within a call: this begins a case of its own, with the time that a call has."""
        before, self._case = self._case, self._named(case)
        limit_anew()
        yield
        self._case = before  # not after an error: it was in this case

    def call_each(self, cases: Mapping[str, tuple], using: Callable | None = None, **options: Any) -> Iterator[Any]:
        """Call the answer with each of these arguments; yield the results, to be judged one by one. Keys: the cases.

        All together are one call, with `options` as for `call`, which takes less time; each has the time that a call
        has. While a result is judged, `calls` and what `cost` counts are those of its own part; after the last one,
        those of all.
        """
        results = []

        def in_turn(answer: Callable, *_: Any) -> None:
            for case, args in cases.items():
                part = _Part(self._named(case), MessageLog(self._world.members))
                self._parts.append(part)
                with self.part(case), traffic() as part.counted, listening(part.log):
                    results.append(using(answer, *args) if using else answer(*args))

        names = {} if using else {case: self._by_name(args) for case, args in cases.items()}
        known = {f"{name} ({case})": value for case, named in names.items() for name, value in named.items()}
        self.call(using=in_turn, **({"beside": known} | options))
        parts, everyones, whole = self._parts, self._reports_of_parts, (self.calls, self._reports)
        kept = Counter(id(result) for result in results if isinstance(result, (list, dict)))
        for number, (case, result) in enumerate(zip(cases, results, strict=True)):
            self._begin(case)
            self._hint = " (it is the same object in several calls: make a new one in each)" * (kept[id(result)] > 1)
            self.calls, self._reports = parts[number].log.calls, [reports[number] for reports in everyones]
            yield result
        self.calls, self._reports = whole
        self._begin("")
        self._hint = ""

    def _by_name(self, args: Sequence[Any]) -> dict[str, Any]:
        """The arguments as the answer calls them, if these are its own: not what it has returned, for instance."""
        names, needed = self._parameters
        own = 0 < needed <= len(args) <= len(names) and not any(map(inspect.isfunction, args))
        own_names = names[: len(args)] if own else []
        return dict(zip(own_names, args, strict=False)) | _numbered(args[len(own_names) :], len(own_names))

    @functools.cached_property
    def _parameters(self) -> tuple[list[str], int]:
        """The names of the answer's parameters, and how many of them have no default."""
        parameters = inspect.signature(self._function).parameters.values()
        needed = sum(parameter.default is inspect.Parameter.empty for parameter in parameters)
        return [parameter.name for parameter in parameters], needed

    def _begin(self, case: str) -> None:
        """What is found from now on belongs to this case, and counts as later than what was found before."""
        self._case = self._named(case)
        self._calls += 1

    def _named(self, case: str) -> str:
        return ", ".join(filter(None, [self.place, case]))

    def call_within(
        self,
        budget: int,
        *args: Any,
        case: str = "",
        note: str = "",
        changes: Collection[Any] = (),
        unit: torch.dtype = torch.float64,
    ) -> Any:
        """Call the answer as `call` does, and return its result. M: it keeps to `budget`.

        budget: elements of `unit` that it may hold at once on this rank beside the tensors in `args`, after any of its
        operations (what a library needs inside one does not count). `note` is added where the budget is exceeded.
        """
        ledger = MemoryLedger(SimpleNamespace(given=args), unit)
        ledger.unremarkable = sys.maxsize
        with ledger("before"):
            pass
        given = ledger.moments[0].elements()
        ledger.unremarkable, ledger.patience = given + budget, LONG_PATIENCE

        leaving = LeavingTorch()

        def in_ledger(answer: Callable, *args: Any) -> Any:
            with ledger("call"), leaving, FreedMemoryRefused():
                return answer(*args)

        result = self.call(*args, case=case, changes=changes, using=in_ledger)
        held = ledger.peak() - given
        complaint = f"holds {held:,} elements at once, budget {budget:,}{f' ({note})' if note else ''}"
        self.criterion("memory", complaint if held > budget else leaving.complaint)
        return result

    def _give_up_for(self, criterion: str, complaints: list[str]) -> None:
        """These complaints, by rank, are why a call failed, whatever it failed with. If there are none, do nothing."""
        guilty = [rank for rank, complaint in enumerate(complaints) if complaint]
        if guilty:
            self._give_up(criterion, f"{ranks(guilty)}: {complaints[guilty[0]]}.")

    def _expected_error(self, outcome: Outcome, raises: str) -> Outcome:
        if outcome.how == "returned":
            self.criterion("value", f"returned, should raise {raises}")
        if outcome.how == "raised" and not outcome.error.startswith(raises):
            outcome.error += f", should raise {raises}"
        return Outcome("returned") if outcome.error.startswith(raises) else outcome

    def value(
        self,
        actual: Any,
        expected: Any,
        what: str = "the result",
        tolerance: float = 0.0,
        every_bit: bool = False,
    ) -> None:
        """V: `actual` is what one process would compute. Compared by `wording.difference`; every_bit: and as bits."""
        complaint = difference(actual, expected, tolerance) or (every_bit and difference_in_bits(actual, expected))
        self.criterion("value", complaint or "", what)

    def untouched(self, actual: Any, before: Any, what: str = "the tensor") -> None:
        """The answer left this as it was."""
        self.criterion("untouched", difference(actual, before) or difference_in_bits(actual, before), what)

    def end_if_wrong(self) -> None:
        """Try nothing further if anything was wrong on any rank: after some mistakes messages would no longer fit."""
        self._end_if_not_waited()
        complaints = [*self._shared.values(), *(text for _, text in self._found.values())]
        if any(self._exchange(any(complaints))):
            raise AnswerFailed

    def end_if_fewer(self, number: int, name: str) -> None:
        """Try nothing further if any rank has made fewer of these calls in the last call: the next could hang."""
        totals = Totals.of([from_text(report) for report in self._reports])
        if any(counts.calls.get(name, 0) < number for counts in totals.per_rank):
            raise AnswerFailed

    def _end_if_not_waited(self) -> None:
        """All ranks know it without an exchange. On those that have not waited, the test may be over."""
        if self._not_waited:
            raise AnswerFailed

    def criterion(self, name: str, complaint: str, what: str = "") -> None:
        """Any other criterion: `complaint` says what is wrong on this rank, "" if nothing is. The first one is kept."""
        complaint += self._hint if name == "value" and complaint else ""
        text = f"{f', {self._case}' if self._case else ''}: {f'{what} {complaint}'.strip()}"  # behind `Rank 2`
        if not self._found.get(name, (0, ""))[1]:
            self._found[name] = (self._calls, text if complaint else "")

    def agreement(self, value: Any) -> None:
        """A: all ranks hold the same bits. Digests are compared at the end."""
        self._digests.append((self._case, hashlib.sha256(bits(value)).hexdigest()))

    def cost(
        self,
        *,
        only: tuple[str, ...] | None = None,
        exactly: bool = False,
        note: Callable[[Totals], str] = lambda _: "",
        totals: Totals | None = None,
        **budget: int | dict[str, int],
    ) -> None:
        """C: the last call stayed within `budget`.

        messages, depth: of all ranks together · max_messages, max_bytes_sent, max_wire_bytes: of the rank with most
        (see `traffic.Totals`) · calls: {name: how often each rank may call it}, other names never · exactly: it must
        call them as often · only: the calls that the answer may be made of · note: adds a sentence where a budget is
        exceeded · totals: what to judge instead of the last call, the same on all ranks.
        """
        totals = totals or Totals.of([from_text(report) for report in self._reports])
        complaints = exceeded(totals, budget, only=only, exactly=exactly, made_by=self._made_by)
        place = self._case if self.place else f"{self.size} ranks{f', {self._case}' if self._case else ''}"
        text = f"{place}: {'; '.join(complaints)}. {note(totals)}".strip() if complaints else ""
        self._shared["cost"] = self._shared.get("cost") or text

    def verdict(self) -> Verdict:
        """Put the ranks' findings together: the same verdict on every rank."""
        lines = prints(self._printed)
        criteria = self._fatal
        with contextlib.suppress(AnswerFailed):
            if not criteria:
                met = attempt(dist.barrier, (self._world.group,), self._seconds)[1].how == "returned"
                found = {"found": self._found, "digests": self._digests, "shared": self._shared}
                facts = self._exchange({"met": met} | found)
                if not all(fact["met"] for fact in facts):
                    self.spoiled = True
                    self._give_up("group", "The process group no longer answers after the calls.")
                criteria = merge(*([fact[what] for fact in facts] for what in found))
        return Verdict(criteria or self._fatal, lines)

    def stumble(self, error: Exception) -> None:
        """End the examination on all ranks: on this one the test itself has failed. Raise the error if on all."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        with contextlib.suppress(AnswerFailed):
            self._exchange({"stumbled": f"The check itself failed, in {place}: {in_short(error)}."})
        if self._all_stumbled:
            raise error

    def _exchange(self, fact: Any) -> list[Any]:
        try:
            facts = self._meeting.exchange(fact, self._seconds + GRACE)
        except RanksMissing as error:
            self.ranks_missing = True
            seconds = f"{self._seconds:g} s"
            self._give_up("runs", f"{ranks(error.missing)} did not come back, though told to stop after {seconds}.")
        stumbled = [rank for rank, each in enumerate(facts) if isinstance(each, dict) and "stumbled" in each]
        if stumbled:
            self.spoiled, self._all_stumbled = True, len(stumbled) == self.size
            self._give_up("runs", f"{ranks(stumbled)}: {facts[stumbled[0]]['stumbled']}")
        return facts

    def _give_up(self, criterion: str, text: str) -> NoReturn:
        self._fatal = {criterion: f"{self._case}: {text}" if self._case else text}
        raise AnswerFailed


def _numbered(things: Iterable[Any], before: int) -> dict[str, Any]:
    return {f"argument {number}": thing for number, thing in enumerate(things, before + 1)}


def _with_group(answer: Callable, group: dist.ProcessGroup) -> Callable:
    return functools.wraps(answer)(functools.partial(answer, group=group))
