"""Lesson 16, what breaks: a run that goes on, how often to save, and logs that name the faulty host."""

import itertools
import math
from collections.abc import Iterator
from math import sqrt

import torch

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.host_logs import fault_in, read_logs_of_another_job, recordings
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import difference


def resume(saved, rank, n, steps):
    """Return this rank's items in the next `steps` steps of a resumed run: a list of lists of ints.

    Together, the n ranks have in each step the items that they would have had without the
    interruption: of an epoch no item is seen twice and none left out, however often n changes.
    saved: a dict. "seed"; "items": how many there are; "ranks": how many the run began with;
    "per_rank": items of each of those ranks in a step; "done": the steps of the run up to the save,
    in all epochs. An epoch ends with a smaller step if the items don't divide. Of a step's items,
    in order, rank r of n takes those at r, r + n, r + 2n, …: at the end it may have none, [].
    """

    def order(epoch):
        generator = torch.Generator().manual_seed(saved["seed"] + epoch)
        return torch.randperm(saved["items"], generator=generator).tolist()

    # How many items has a step? In which epoch is the first one, and where?
    # answer: begin
    batch = saved["ranks"] * saved["per_rank"]
    steps_per_epoch = -(-saved["items"] // batch)
    mine = []
    for step in range(saved["done"], saved["done"] + steps):
        epoch, number = divmod(step, steps_per_epoch)
        items = order(epoch)[number * batch : (number + 1) * batch]
        mine.append(items[rank::n])
    return mine
    # answer: end


def saving_interval(save, restart, days, hosts):
    """Return the seconds of work between two saves with which a job loses the least time, a float.

    save, restart: seconds that a save and a restart take; meanwhile nobody works. A host fails once
    in `days` days on average, at any moment equally likely, and one failed host stops the job.
    What was done since the last save is lost. The save takes at most a 50th of the time between
    two failures of the job. The result may be 10 % off the best.
    """
    # What does a shorter interval cost, and what a longer one? What does a restart change in that?
    # answer: begin
    between_failures = days * 24 * 3600 / hosts
    return sqrt(2 * save * between_failures)
    # answer: end


def faulty_host(logs):
    """Return (host, cause): which of two hosts is to be repaired, and what is wrong there.

    logs: a dict from each host's name to what was printed there. Each log begins with the host's
    name, its address and what its own name leads to. On many systems that is 127.0.1.1, which does
    no harm here, as GLOO_SOCKET_IFNAME is set, unless the rendezvous is to be on that host. Names,
    addresses, ports, interfaces, versions and times are drawn; the hosts come in either order.
    cause is
    "interface": the ranks there are to use a network interface that the host does not have
    "name": its own name leads to 127.0.1.1, so it does not see that the rendezvous is to be there
    "version": it has another version of a package than the notebook
    One host has one of these faults, and nothing else is wrong.
    """
    # Which line names a cause? Which host only waited for the other?
    # answer: begin
    for host, log in logs.items():
        own_address = log.split("hostname -I")[1].split()[0]
        if "Unable to find address for" in log:
            return host, "interface"
        if "did not let this host in" in log:
            return host, "version"
        if f"trying to connect to ({own_address}," in log:
            return host, "name"
    # answer: end


def examine_resume(trial: Trial) -> None:
    """V on the ranks of each new number of ranks: in an epoch, over its end, several of them; drawn runs."""
    runs = [  # items, ranks, per_rank, done, n, steps
        (48, 4, 3, 2, 4, 2),
        (48, 4, 3, 2, 2, 4),
        (48, 4, 3, 1, 3, 7),
        (48, 2, 3, 8, 4, 3),
        (50, 4, 3, 4, 4, 3),
        (50, 4, 3, 5, 2, 6),
        (50, 4, 3, 14, 5, 8),
        (46, 4, 3, 3, 3, 2),
        (37, 3, 4, 0, 1, 9),
        (7, 2, 5, 3, 8, 2),
        (20, 1, 4, 6, 2, 0),
        (9, 3, 1, 100, 2, 4),
        (5, 2, 2, 2000, 3, 3),
        (20, 1, 3, 8, 6, 4),  # more ranks than items in a step
        (4097, 64, 64, 1, 2, 2),
        (300, 13, 20, 1, 100, 3),
        (3, 2, 4, 0, 1, 1010),  # an epoch is one step
    ]
    generator = trial.generator()
    drawn = torch.randint(1, 7, (4, 6), generator=generator).tolist()
    seeds = torch.randint(2**40, (len(drawn),), generator=generator).tolist()
    runs = runs if trial.on_all_ranks else runs[:4]
    runs += [(10 * items + done, ranks, per_rank, done, n, steps) for items, ranks, per_rank, done, n, steps in drawn]
    cases, expected = {}, {}
    for number, (items, ranks, per_rank, done, n, steps) in enumerate(runs):
        saved = {"seed": 3 * (number // 2), "items": items, "ranks": ranks, "per_rank": per_rank, "done": done}
        if number >= len(runs) - len(drawn):
            saved["seed"] = seeds.pop()
        everyones = list(itertools.islice(_steps_from(saved), steps))
        saved = dict(sorted(saved.items(), reverse=number % 2))  # a dict's order says nothing
        note = f", drawn with seed {trial.seed}" if number >= len(runs) - len(drawn) else ""
        for rank in range(n) if n < 10 else (0, 1, n // 2, n - 1):
            case = f"saved={saved}, rank {rank} of {n}, {steps} steps{note}"
            cases[case] = (dict(saved), rank, n, steps)
            expected[case] = [everyone[rank::n] for everyone in everyones]
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        trial.criterion("value", _wrong_items(result, expected[case]), "the result")
    trial.cost(calls={})


def _steps_from(saved: dict[str, int]) -> Iterator[list[int]]:
    """The items of each step after those that are done."""
    batch = saved["ranks"] * saved["per_rank"]
    steps = len(range(0, saved["items"], batch))  # of an epoch
    done = saved["done"] % steps
    for epoch in itertools.count(saved["done"] // steps):
        generator = torch.Generator().manual_seed(saved["seed"] + epoch)
        order = torch.randperm(saved["items"], generator=generator)
        yield from (step.tolist() for step in order.split(batch)[done:])
        done = 0


def _wrong_items(result: object, right: list[list[int]]) -> str:
    if not isinstance(result, list) or len(result) != len(right):
        length = f", of {len(result)} steps, not {len(right)}" if isinstance(result, list) else ""
        return f"{difference(result, right)}{length}"
    for number, (mine, items) in enumerate(zip(result, right, strict=True)):
        if type(mine) is list and mine == items and {int}.issuperset(map(type, mine)):
            continue
        if complaint := difference(mine, items) or next(filter(None, map(difference, mine, items)), ""):
            return f"for step {number} of these {complaint}"
    return ""


def examine_saving_interval(trial: Trial) -> None:
    """V within 10 %: long and short saves, few hosts and many, restarts that take long or no time; drawn ones."""
    day = 86_400
    jobs = [(2, 18, 600 / day, 1), (2, 600, 600 / day, 1), (2, 18, 1200 / day, 2), (12, 60, 600 / day, 1)]
    jobs += [(60, 300, 30, 1), (60, 300, 30, 1000), (30, 600, 1000, 16_384), (10, 0, 1, 24), (1e-3, 1.0, 1e-3, 80)]
    jobs += [(2, 18, 1200 / day, 1), (1e-5, 0, 5e-6, 1), (3000, 60, 20_000, 1), (0.1, 10, 5_000, 1_000_000)]
    given = len(jobs)
    for share, mean, restart, hosts in torch.rand(24, 4, generator=trial.generator()).tolist():
        mean, hosts = 10 ** (8 * mean), int(10 ** (4.5 * hosts))  # of all magnitudes
        jobs.append((mean / 50 / 10 ** (5 * share), 50 * restart * mean, mean * hosts / day, hosts))
    cases = {
        f"save={save:.3g}, restart={restart:.3g}, days={days:.4g}, hosts={hosts:,}"
        + (f" (seed {trial.seed})" if number >= given else ""): (save, restart, days, hosts)
        for number, (save, restart, days, hosts) in enumerate(jobs)
    }
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        save, _, days, hosts = cases[case]
        trial.criterion("value", _wrong_interval(result, _best_interval(save, days * day / hosts)), "the result")
    trial.cost(calls={})


def _best_interval(save: float, mean: float) -> float:
    """Where failures come every `mean` seconds, an interval of t seconds takes mean · (exp((t + save) / mean) - 1).

    That includes what failures repeat, and each restart takes its share of it, whatever t is. Divided by t, it is least
    where (1 - t/mean) · exp((t + save) / mean) = 1.
    """
    low, high = 0.0, mean
    for _ in range(60):
        middle = (low + high) / 2
        if (1 - middle / mean) * math.exp((middle + save) / mean) > 1:
            low = middle
        else:
            high = middle
    return low


def _wrong_interval(result: object, best: float) -> str:
    if isinstance(result, bool) or not isinstance(result, (int, float)):  # numpy's float64 is a float
        return difference(result, best)
    return "" if 0.9 * best <= result <= 1.1 * best else f"is {result:.4g}, should be {best:.4g}, give or take 10 %"


def examine_faulty_host(trial: Trial) -> None:
    """V on every recording as another job would have printed it, with the host at fault first and last."""
    cases, expected = {}, {}
    generator = trial.generator()
    numbers = iter(torch.randperm(900, generator=generator).tolist())
    jobs = list(itertools.product(recordings(), (False, True), (False, True)))
    for recording, turned, alike in jobs if trial.on_all_ranks else jobs[::4]:
        if alike and fault_in(recording)[1] != "name":  # where addresses are compared
            continue
        number, other = next(numbers), next(numbers)
        pairs = (f"gpu{number}", f"worker-{other}"), (f"node{number}", f"node{number}1"), ("gpu", f"gpu{number}")
        names = pairs[(number + turned) % 3][:: 1 if other % 2 else -1]
        given = names[::-1] if turned else names
        logs = read_logs_of_another_job(recording, given, generator, names[0] if alike else "")
        case = f"recording {recording} with other names and numbers, names {' and '.join(given)}, seed {trial.seed}"
        cases[case] = ({name: logs[name] for name in names},)
        expected[case] = fault_in(recording, given)
    for case, result in zip(cases, trial.call_each(cases), strict=True):
        trial.value(result, expected[case])
    trial.cost(calls={})


RESUME = Exercise(resume, examine_resume)
SAVING_INTERVAL = Exercise(saving_interval, examine_saving_interval, given="from math import sqrt")
FAULTY_HOST = Exercise(
    faulty_host, examine_faulty_host, also_named=("read_logs", "read_logs_of_another_job", "fault_in")
)
EXERCISES = (RESUME, SAVING_INTERVAL, FAULTY_HOST)
