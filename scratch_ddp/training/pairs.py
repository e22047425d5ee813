"""Built-in sentence pairs, made by a small grammar, for machines without access to the hub and for tests.

Each pair is about one decision of a company. A paraphrase says the same in other words and another order. A near miss
says almost the same: negated, in the other direction, or about another thing. Most words are the same in both.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

COMPANIES = ("Halden Foods", "Norvik Energy", "Castor Motors", "Blue Quay", "Orlen Systems", "Tavira Air")
PLACES = ("Lisbon", "Oslo", "Vienna", "Dublin", "Prague", "Athens")
TIMES = ("on Monday", "on Tuesday", "on Thursday", "on Friday", "last week", "this spring")
THINGS = ("prices", "wages", "fees", "rents", "budgets", "tariffs")
AMOUNTS = ("two", "three", "five", "seven", "nine", "twelve")
VERBS = {True: {"raised": "raise", "increased": "increase"}, False: {"cut": "cut", "lowered": "lower"}}
NEAR_MISSES = ("negated",) * 5 + ("upward",) * 4 + ("thing",)  # each as often as it stands here
SIZES = {"train": 800, "validation": 200, "test": 200}


class Decision(NamedTuple):
    company: str
    place: str
    time: str
    thing: str
    amount: str
    upward: bool
    negated: bool


class Grammar:
    """Draws random decisions and puts them into words. The same seed gives the same sentences on every platform."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def pick(self, choices: Sequence):
        return choices[int(self._random.random() * len(choices))]  # Python guarantees the sequence of random() alone

    def decision(self) -> Decision:
        slots = [self.pick(words) for words in (COMPANIES, PLACES, TIMES, THINGS, AMOUNTS)]
        return Decision(*slots, upward=self.pick((True, False)), negated=self.pick(range(10)) == 0)

    def near_miss(self, decision: Decision) -> Decision:
        """Change one thing that matters."""
        what = self.pick(NEAR_MISSES)
        if what == "thing":
            return decision._replace(thing=self.pick([thing for thing in THINGS if thing != decision.thing]))
        return decision._replace(**{what: not getattr(decision, what)})

    def sentence(self, d: Decision) -> str:
        """One of sixteen wordings: two verbs, four forms, the time at the start or at the end."""
        past = self.pick(tuple(VERBS[d.upward]))
        present = VERBS[d.upward][past]
        no = "not " if d.negated else ""
        core = self.pick(
            (
                f"{d.company} {f'did not {present}' if no else past} its {d.thing} in {d.place}",
                f"{d.company} has {no}{past} {d.thing} in {d.place}",
                f"the {d.thing} of {d.company} in {d.place} were {no}{past}",
                f"in {d.place}, {d.thing} at {d.company} were {no}{past}",
            )
        )
        core += f" by {d.amount} percent"
        text = self.pick((f"{core} {d.time}", f"{d.time}, {core}"))
        return text[0].upper() + text[1:] + "."


def make_pairs(sizes: dict[str, int] | None = None, seed: int = 0) -> dict[str, dict[str, list]]:
    """Return {split: {"sentence1": […], "sentence2": […], "label": […], "idx": […]}}. Half of a split are paraphrases.

    No pair occurs twice in all splits together. The same arguments give the same pairs.
    """
    grammar, seen = Grammar(seed), set()
    splits = {}
    for split, size in (sizes or SIZES).items():
        columns = {"sentence1": [], "sentence2": [], "label": [], "idx": []}
        while len(columns["idx"]) < size:
            decision, label = grammar.decision(), len(columns["idx"]) % 2
            pair = (grammar.sentence(decision), grammar.sentence(decision if label else grammar.near_miss(decision)))
            if pair[0] == pair[1] or pair in seen:
                continue
            seen.add(pair)
            for name, value in zip(columns, (*pair, label, len(columns["idx"])), strict=True):
                columns[name].append(value)
        splits[split] = columns
    return splits
