"""The book's moving figures: what a lesson draws once, with sliders, drawn by Vega in the reader's browser.

A cell of a lesson that is tagged `moving:NAME` gets the figure of that name behind its output, in the book only. Every
position of the sliders is computed here, by the functions that the lessons use; the page only chooses among them. Vega
comes along as one file, so that the pages work without a network.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import altair as alt
import torch

from scratch_ddp.common.tensors import MB
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, rank_color
from scratch_ddp.instruments.cost import BOUNDS, CLUSTERS, MODELS, Backward, Link, bucketed, ring_bytes, what_binds
from scratch_ddp.instruments.memory import MemoryLedger
from scratch_ddp.pipeline import bubble, held, schedules, simulate

TAG = "moving:"
LIBRARY = "vega.js"  # beside index.html; every lesson is one folder deeper
SNIPPET = """<div class="moving" id="moving-{name}" role="img" aria-label="{description}"></div>
<script src="../{library}"></script>
<script>vegaEmbed("#moving-{name}", {spec}, {{renderer: "svg", actions: false}});</script>"""
Rows = list[dict[str, Any]]


def html(name: str) -> str:
    """A figure as HTML for a page beside the library; raises KeyError for an unknown name."""
    chart = FIGURES[name]()
    spec = json.dumps(chart.to_dict(), separators=(",", ":")).replace("</", "<\\/")
    return SNIPPET.format(name=name, description=chart.description, library=LIBRARY, spec=spec)


def library() -> str:
    """Vega, Vega-Lite and vega-embed as one script that defines `vegaEmbed`."""
    from vl_convert import javascript_bundle

    script = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return f"(() => {{{script}\n}})();"  # its names are its own: Sphinx's scripts use some of them, too


# Six figures.


def ring() -> alt.Chart:
    """Lesson 02: what each rank has of each chunk after each step of the ring."""
    rows = [
        {"n": n, "step": step, "rank": rank, "chunk": chunk, "parts": parts, "new": int(chunk == arrived)}
        for n in range(2, 9)
        for step, ranks in enumerate(ring_steps(n, 15))
        for rank, (chunks, arrived) in enumerate(ranks)
        for chunk, parts in enumerate(chunks)
    ]
    cells = figure(rows, "A ring all-reduce, step by step", n=(2, 8, 4, "ranks"), step=(0, 14, 0, "step"))
    gaps = alt.Scale(paddingInner=0.08)
    place = {"x": alt.X("chunk:O", axis=alt.Axis(labelAngle=0), scale=gaps), "y": alt.Y("rank:O", scale=gaps)}
    full = alt.Color("share:Q", scale=alt.Scale(scheme="blues", domain=[0, 1.3]), legend=None)
    boxes = cells.transform_calculate(share="datum.parts / datum.n").mark_rect(strokeWidth=3)
    frame = alt.condition("datum.new", alt.value(SENT_COLOR), alt.value("transparent"))
    text = cells.mark_text(color="black").encode(text=alt.Text("parts:Q"), **place)
    sent = said(cells, "format(min(datum.step, 2 * (datum.n - 1)) / datum.n, '.2f') + ' S sent by each rank'")
    return page(boxes.encode(color=full, stroke=frame, **place) + text + sent, height=260)


def ring_steps(n: int, count: int) -> list[list[tuple[list[int], int | None]]]:
    """At the start and after each step, for each rank: how many ranks' parts its chunks have, and which has just come.

    A ring of n ranks is complete after 2(n-1) steps; in those that follow nothing comes.
    """
    have, steps = [[1] * n for _ in range(n)], [[([1] * n, None) for _ in range(n)]]
    for step in range(count - 1):
        adding, gathering = step < n - 1, step < 2 * (n - 1)
        arrived = [(rank - 1 - step) % n if gathering else None for rank in range(n)]
        # a neighbour sends what it has: where sums still travel, the receiver adds its own part
        have = [
            [have[rank - 1][chunk] + adding if chunk == arrived[rank] else parts for chunk, parts in enumerate(mine)]
            for rank, mine in enumerate(have)
        ]
        steps.append(list(zip(have, arrived, strict=True)))
    return steps


def buckets() -> alt.Chart:
    """Lesson 09: a backward of eight gradients and its all-reduces, for a bucket size and a link."""
    rows: Rows = []
    backward = Backward.in_proportion(8 * [MB], seconds=0.080)
    for size, ms_per_mb in product(range(1, 9), range(2, 17, 2)):
        wire = Link(alpha=0.008, beta=1e-3 * ms_per_mb / MB).wire(2)
        step = bucketed(backward, wire, size, first_mb=size)
        told = {"exposed": round(1e3 * step.exposed), "calls": step.calls}
        spans = [("backward", 0.0, backward.seconds)]
        spans += [("all-reduce", each.started, each.ended) for each in step.all_reduces]
        rows += [
            {"size": size, "link": ms_per_mb, "what": what, "start": ms(start), "end": ms(end), **told}
            for what, start, end in spans
        ]
    sliders = {"size": (1, 8, 2, "MB in a bucket"), "link": (2, 16, 4, "ms per MB")}
    spans = figure(rows, "Buckets during backward", **sliders)
    color = alt.Color("what:N", legend=None, scale=alt.Scale(range=[rank_color(1), rank_color(0)]))
    place = {"y": alt.Y("what:N", title=None, sort=["backward", "all-reduce"])}
    time = alt.X("start:Q", title="ms after the backward's start", scale=alt.Scale(domain=[0, 215]))
    bars = spans.mark_bar(stroke="white").encode(x=time, x2="end:Q", color=color, **place)
    return page(bars + said(spans, "datum.exposed + ' ms exposed, ' + datum.calls + ' messages'"), height=90)


def fsdp_memory() -> alt.Chart:
    """Lesson 10: what a rank holds through a sharded step."""
    rows: Rows = []
    for n, layers, kept in product((2, 4, 8, 16), (2, 4, 8), (0, 1)):
        moments = sharded_step(n, layers, keep=bool(kept))
        for at, moment in enumerate(moments):
            for kind in KINDS:
                share = 100 * moment.elements(kind) / (layers * WIDTH * WIDTH)
                rows.append({"n": n, "layers": layers, "kept": kept, "at": at, "kind": kind, "share": share})
                rows[-1] |= {"moment": moment.name, "place": list(KINDS).index(kind)}
    options = {"n": [2, 4, 8, 16], "layers": [2, 4, 8]}
    named = {"n": (options["n"], 4, "ranks"), "layers": (options["layers"], 4, "layers")}
    held_now = figure(rows, "Memory through a sharded step", kept=(False, "kept after forward"), **named)
    held_now = held_now.transform_calculate(name=f"{json.dumps(KINDS)}[datum.kind]")
    colors = alt.Scale(domain=list(KINDS.values()), range=[rank_color(0), rank_color(1), rank_color(4), "#8a8a8a"])
    return page(
        held_now.mark_bar().encode(
            x=alt.X("at:O", title="moments of the step: forward, then backward", axis=alt.Axis(labels=False)),
            y=alt.Y("share:Q", title="% of the model's weights", scale=alt.Scale(domain=[0, 220])),
            color=alt.Color("name:N", title=None, scale=colors, legend=alt.Legend(orient="top", columns=2)),
            order=alt.Order("place:Q"),
            tooltip=["moment:N", "name:N", alt.Tooltip("share:Q", format=".1f")],
        ),
        height=240,
    )


WIDTH = 16  # every layer is a square matrix
KINDS = {"own": "own rows", "borrowed": "gathered", "partial": "own gradient", "summed": "summed gradient"}


def sharded_step(n: int, layers: int, keep: bool) -> list:
    """Lesson 10's step on rank 0 of n, as its ledger sees it; what other ranks would send is a copy of its own."""
    m = SimpleNamespace(own=[torch.zeros(WIDTH // n, WIDTH) for _ in range(layers)], borrowed={}, summed=[])
    ledger = MemoryLedger(m, torch.float32, **{kind: kind for kind in KINDS})

    def gather(layer: int) -> None:
        with ledger(f"gather W{layer}"):
            if layer not in m.borrowed:
                m.borrowed[layer] = m.own[layer].repeat(n, 1)

    for layer in range(layers):
        gather(layer)
        if not keep:
            with ledger(f"free W{layer}"):
                del m.borrowed[layer]
    for layer in reversed(range(layers)):
        gather(layer)
        with ledger(f"gradient of W{layer}"):
            m.partial = torch.zeros_like(m.borrowed[layer])
        with ledger(f"free W{layer}"):
            del m.borrowed[layer]
        with ledger("reduce-scatter"):
            m.summed.append(m.partial[: WIDTH // n].clone())
            del m.partial
    return ledger.moments


def pipeline() -> alt.Chart:
    """Lesson 13: what each rank does when, for a schedule, its ranks and its micro-batches."""
    makers: Mapping[str, Callable] = {
        "GPipe": schedules.gpipe,
        "1F1B": schedules.one_f_one_b,
        "interleaved": lambda p, m: schedules.interleaved(p, m, 2),
        "ZB-H1": schedules.zb_h1,
    }
    half = {"F": 0.5, "B": 1.0}
    rows: Rows = []
    for (name, make), p, times in product(makers.items(), (2, 4, 6), (1, 2, 3)):
        schedule = make(p, times * p)
        spans = simulate(schedule, half) if name == "interleaved" else simulate(schedule)
        most = max(held(row) for row in schedule) / (2 if name == "interleaved" else 1)
        told = {"bubble": round(100 * bubble(spans)), "held": most}
        for rank, row in enumerate(spans):
            for action, start, end in row:
                key = {"which": name, "p": p, "times": times, "rank": rank, **told}
                rows.append({**key, "kind": action.kind, "micro": action.micro, "start": start, "end": end})
    sliders = {"which": (list(makers), "1F1B", "schedule"), "p": ([2, 4, 6], 4, "ranks")}
    spans = figure(rows, "Pipeline schedules", times=(1, 3, 2, "micro-batches / ranks"), **sliders)
    spans = spans.transform_calculate(name=f"{json.dumps(NAMES)}[datum.kind]")
    colors = alt.Scale(domain=list(NAMES.values()), range=[rank_color(0), rank_color(1), rank_color(5), rank_color(2)])
    bars = spans.mark_bar(stroke="white").encode(
        x=alt.X("start:Q", title="time, in forwards"),
        x2="end:Q",
        y=alt.Y("rank:O"),
        color=alt.Color("name:N", title=None, scale=colors, legend=alt.Legend(orient="top", columns=2)),
        tooltip=["name:N", "micro:Q"],
    )
    return page(bars + said(spans, "'bubble ' + datum.bubble + ' %, at most ' + datum.held + ' activations held'"), 200)


NAMES = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}


def bounds() -> alt.Chart:
    """Lesson 15: which part of a step sets the pace, over GPUs and batch."""
    sequence, choices = 2048, (1, 2, 4, 8)
    rows = [
        {"tp": tp, "cp": cp, "gpus": n, "batch": batch * sequence // 1024, "binds": BOUNDS.index(binds)}
        for tp, cp, n, batch in product(choices, (0, 1), [2**k for k in range(4, 15)], [2**k for k in range(3, 15)])
        if (binds := what_binds(MODELS["XXL"], CLUSTERS["H100"], n, batch, sequence, tp, bool(cp)))
    ]
    sliders = {"tp": (list(choices), 8, "tensor parallel"), "cp": (True, "checkpointing")}
    cells = figure(rows, "What sets the pace: XXL on H100", **sliders)
    names = json.dumps(list(BOUNDS))
    cells = cells.transform_calculate(name=f"{names}[datum.binds]")
    colors = alt.Scale(domain=list(BOUNDS), range=["#8cc08a", "#f2b27a", "#b89acb", "#e39a9d", "#c8c8c8"])
    return page(
        cells.mark_rect().encode(
            x=alt.X("gpus:O", title="GPUs", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
            y=alt.Y("batch:O", title="Ki tokens in a step", sort="descending"),
            color=alt.Color("name:N", title=None, scale=colors, legend=alt.Legend(orient="top", columns=2)),
            tooltip=["gpus:Q", "batch:Q", "name:N"],
        ),
        height=280,
    )


def hosts() -> alt.Chart:
    """Lesson 16: what an all-reduce of S bytes sends out of a host, in three ways."""
    rows: Rows = []
    for count, each in product(range(2, 9), range(1, 9)):
        blocks = [host for host in range(count) for _ in range(each)]
        orders = {"ring, ranks in blocks": blocks, "ring, ranks cyclic": [*range(count)] * each}
        out = {name: leaves_host(order, UNIT) for name, order in orders.items()}
        out["hierarchical"] = each * leaves_host([*range(count)], UNIT // each)
        rows += [{"hosts": count, "each": each, "way": way, "out": nbytes / UNIT} for way, nbytes in out.items()]
    sliders = {"hosts": (2, 8, 2, "hosts"), "each": (1, 8, 2, "ranks in each")}
    bars = figure(rows, "Bytes that leave a host", **sliders)
    place = {
        "x": alt.X("out:Q", title="bytes out of a host, in S", scale=alt.Scale(domain=[0, 16])),
        "y": alt.Y("way:N", title=None, sort=None, axis=alt.Axis(labelLimit=130)),
    }
    numbers = bars.mark_text(align="left", dx=4, color=GREY).encode(text=alt.Text("out:Q", format=".2f"), **place)
    return page(bars.mark_bar(color=SENT_COLOR).encode(**place) + numbers, height=110)


UNIT = 840 * 64  # bytes: all numbers of ranks here divide it


def leaves_host(order: list[int], nbytes: int) -> int:
    """The most bytes that leave a host in a ring all-reduce over ranks in this order of their hosts."""
    out = Counter()
    for rank, host in enumerate(order):
        if order[(rank + 1) % len(order)] != host:
            out[host] += round(ring_bytes("all_reduce", nbytes, len(order), rank))
    return max(out.values())


FIGURES: Mapping[str, Callable[[], alt.Chart]] = {
    "ring": ring,
    "buckets": buckets,
    "fsdp_memory": fsdp_memory,
    "pipeline": pipeline,
    "bounds": bounds,
    "hosts": hosts,
}


# What they share.


def figure(rows: Rows, description: str, **controls: tuple) -> alt.Chart:
    """A chart of the rows whose columns named in `controls` are those that the reader chooses.

    A control is (from, to, at first, label), a slider; (choices, at first, label), a list; or (at first, label), a box.
    """
    parameters = []
    for name, (*choices, first, label) in controls.items():
        if len(choices) == 2:
            bind = alt.binding_range(min=choices[0], max=choices[1], step=1, name=f"{label} ")
        elif choices:
            bind = alt.binding_select(options=choices[0], name=f"{label} ")
        else:
            bind = alt.binding_checkbox(name=f"{label} ")
        parameters.append(alt.param(name, value=first, bind=bind))
    table = io.StringIO()  # as CSV, which does not repeat the names in each row
    writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    kinds = {name: "string" if isinstance(value, str) else "number" for name, value in rows[0].items()}
    data = alt.InlineData(table.getvalue(), format=alt.CsvDataFormat(type="csv", parse=kinds))
    chart = alt.Chart(data, description=description).add_params(*parameters)
    return chart.transform_filter(" && ".join(f"datum.{name} == {name}" for name in controls))


def said(rows: alt.Chart, words: str) -> alt.Chart:
    """Above the figure, a sentence made of what all of its rows say alike; `words` is an expression of Vega."""
    one = rows.transform_calculate(words=words).transform_aggregate(text="min(words)")
    return one.mark_text(align="left", x=0, y=-8, color=GREY).encode(text="text:N")


def page(chart: alt.Chart | alt.LayerChart, height: int) -> alt.Chart | alt.LayerChart:
    """As wide as the page, in colours that can be read on a light and on a dark one."""
    grey = {"labelColor": GREY, "titleColor": GREY, "domainColor": QUIET, "tickColor": QUIET, "gridColor": f"{QUIET}55"}
    legend = {"labelColor": GREY, "titleColor": GREY}
    return chart.properties(width="container", height=height, background="transparent").configure(
        axis=grey, legend=legend, view={"stroke": None}
    )


def ms(seconds: float) -> float:
    return round(1e3 * seconds, 2)
