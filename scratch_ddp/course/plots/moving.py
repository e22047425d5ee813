"""The book's moving figures: what a lesson draws once, with sliders, drawn by Vega in the reader's browser.

A cell of a lesson that is tagged `moving:NAME` gets the figure of that name behind its output, in the book only. Every
position of the sliders is computed here; the page only chooses among them. Vega comes along as one file, so that the
pages work without a network.
"""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import altair as alt

from scratch_ddp.common.tensors import MB
from scratch_ddp.course.plots.style import GREY, QUIET, SENT_COLOR, rank_color
from scratch_ddp.instruments.cost import BOUNDS, CLUSTERS, MODELS, Backward, Link, bucketed, what_binds
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


def ring() -> alt.Chart:
    """Lesson 02: what each rank has of each chunk after each step of the ring."""
    rows: Rows = []
    for n, step in product(range(2, 9), range(15)):
        for rank, chunk in product(range(n), range(n)):
            # After how many steps has the chunk come here, as a part of the sum, and again as the whole?
            part, whole = (rank - chunk - 1) % n + 1, (rank - chunk) % n + n
            parts = n if step >= whole else part + 1 if step >= part else 1
            new = int(step in (part, whole) and step < 2 * n - 1)
            rows.append({"n": n, "step": step, "rank": rank, "chunk": chunk, "parts": parts, "new": new})
    cells = figure(rows, "A ring all-reduce, step by step", n=(2, 8, 4, "ranks"), step=(0, 14, 0, "step"))
    gaps = alt.Scale(paddingInner=0.08)
    place = {"x": alt.X("chunk:O", axis=alt.Axis(labelAngle=0), scale=gaps), "y": alt.Y("rank:O", scale=gaps)}
    full = alt.Color("share:Q", scale=alt.Scale(scheme="blues", domain=[0, 1.3]), legend=None)
    boxes = cells.transform_calculate(share="datum.parts / datum.n").mark_rect(strokeWidth=3)
    frame = alt.condition("datum.new", alt.value(SENT_COLOR), alt.value("transparent"))
    text = cells.mark_text(color="black").encode(text=alt.Text("parts:Q"), **place)
    sent = said(cells, "format(min(datum.step, 2 * (datum.n - 1)) / datum.n, '.2f') + ' S sent by each rank'")
    return page(boxes.encode(color=full, stroke=frame, **place) + text + sent, 260)


def buckets() -> alt.Chart:
    """Lesson 09: a backward of eight gradients and its all-reduces, for a bucket size and a link."""
    rows: Rows = []
    backward = Backward.in_proportion(8 * [MB], seconds=0.080)
    for size, ms_per_mb in product(range(1, 9), range(2, 17, 2)):
        wire = Link(alpha=0.008, beta=1e-3 * ms_per_mb / MB).wire(2)
        step = bucketed(backward, wire, size, first_mb=size)
        told = {"size": size, "link": ms_per_mb, "exposed": round(1e3 * step.exposed), "calls": step.calls}
        spans = [("backward", 0.0, backward.seconds)]
        spans += [("all-reduce", each.started, each.ended) for each in step.all_reduces]
        for what, *ends in spans:
            start, end = (round(1e3 * seconds, 2) for seconds in ends)
            rows.append(told | {"what": what, "start": start, "end": end})
    sliders = {"size": (1, 8, 2, "MB in a bucket"), "link": (2, 16, 4, "ms per MB")}
    spans = figure(rows, "Buckets during backward", **sliders)
    color = alt.Color("what:N", legend=None, scale=alt.Scale(range=[rank_color(1), rank_color(0)]))
    place = {"y": alt.Y("what:N", title=None, sort=["backward", "all-reduce"])}
    time = alt.X("start:Q", title="ms after the backward's start", scale=alt.Scale(domain=[0, 215]))
    bars = spans.mark_bar(stroke="white").encode(x=time, x2="end:Q", color=color, **place)
    return page(bars + said(spans, "datum.exposed + ' ms exposed, ' + datum.calls + ' messages'"), 90)


KINDS = ("own rows", "gathered", "own gradient", "summed gradient")


def fsdp_memory() -> alt.Chart:
    """Lesson 10: what a rank holds through a sharded step."""
    rows: Rows = []
    for n, layers, kept in product((2, 4, 8, 16), (2, 4, 8), (0, 1)):
        for at, (moment, gathered, gradients, summed) in enumerate(sharded_step(layers, bool(kept))):
            told = {"n": n, "layers": layers, "kept": kept, "at": at, "moment": moment}
            for place, number in enumerate((layers / n, gathered, gradients, summed / n)):
                rows.append(told | {"place": place, "kind": KINDS[place], "share": 100 * number / layers})
    lists = {"n": ([2, 4, 8, 16], 4, "ranks"), "layers": ([2, 4, 8], 4, "layers")}
    held_now = figure(rows, "Memory through a sharded step", kept=(False, "kept after forward"), **lists)
    chart = held_now.mark_bar().encode(
        x=alt.X("at:O", title="moments of the step: forward, then backward", axis=alt.Axis(labels=False)),
        y=alt.Y("share:Q", title="% of the model's weights", scale=alt.Scale(domain=[0, 220])),
        color=colors("kind", KINDS, [rank_color(0), rank_color(1), rank_color(4), "#8a8a8a"]),
        order=alt.Order("place:Q"),
        tooltip=["moment:N", "kind:N", alt.Tooltip("share:Q", format=".1f")],
    )
    return page(chart, 240)


def sharded_step(layers: int, keep: bool) -> Iterator[tuple[str, int, int, int]]:
    """Lesson 10's step: each moment, and of how many layers weights are gathered, gradients whole, and summed."""
    for layer in range(layers):
        yield f"gather W{layer}", layer + 1 if keep else 1, 0, 0
        if not keep:
            yield f"free W{layer}", 0, 0, 0
    for summed, layer in enumerate(reversed(range(layers))):
        others = layer if keep else 0
        yield f"gather W{layer}", others + 1, 0, summed
        yield f"gradient of W{layer}", others + 1, 1, summed
        yield f"free W{layer}", others, 1, summed
        yield "reduce-scatter", others, 0, summed + 1


ACTIONS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradients of the weights"}


def pipeline() -> alt.Chart:
    """Lesson 13: what each rank does when, for a schedule, its ranks and its micro-batches."""
    makers = {  # and how many stages a rank has
        "GPipe": (schedules.gpipe, 1),
        "1F1B": (schedules.one_f_one_b, 1),
        "interleaved": (lambda p, m: schedules.interleaved(p, m, 2), 2),
        "ZB-H1": (schedules.zb_h1, 1),
    }
    rows: Rows = []
    for (name, (make, stages)), p, times in product(makers.items(), (2, 4, 6), (1, 2, 3)):
        schedule = make(p, times * p)
        spans = simulate(schedule, {"F": 1 / stages, "B": 2 / stages, "I": 1.0, "W": 1.0})
        told = {"which": name, "p": p, "times": times, "bubble": round(100 * bubble(spans))}
        told["held"] = max(held(row) for row in schedule) / stages
        for rank, row in enumerate(spans):
            for action, start, end in row:
                kind = ACTIONS[action.kind]
                rows.append(told | {"rank": rank, "kind": kind, "micro": action.micro, "start": start, "end": end})
    sliders = {"which": (list(makers), "1F1B", "schedule"), "p": ([2, 4, 6], 4, "ranks")}
    spans = figure(rows, "Pipeline schedules", times=(1, 3, 2, "micro-batches / ranks"), **sliders)
    bars = spans.mark_bar(stroke="white").encode(
        x=alt.X("start:Q", title="time, in forwards"),
        x2="end:Q",
        y=alt.Y("rank:O"),
        color=colors("kind", list(ACTIONS.values()), [rank_color(place) for place in (0, 1, 5, 2)]),
        tooltip=["kind:N", "micro:Q"],
    )
    return page(bars + said(spans, "'bubble ' + datum.bubble + ' %, at most ' + datum.held + ' activations held'"), 200)


def bounds() -> alt.Chart:
    """Lesson 15: which part of a step sets the pace, over GPUs and batch."""
    sequence, choices = 2048, (1, 2, 4, 8)
    rows = [
        {"tp": tp, "cp": cp, "gpus": n, "batch": batch * sequence // 1024, "binds": binds}
        for tp, cp, n, batch in product(choices, (0, 1), [2**k for k in range(4, 15)], [2**k for k in range(3, 15)])
        if (binds := what_binds(MODELS["XXL"], CLUSTERS["H100"], n, batch, sequence, tp, bool(cp)))
    ]
    sliders = {"tp": (list(choices), 8, "tensor parallel"), "cp": (True, "checkpointing")}
    cells = figure(rows, "What sets the pace: XXL on H100", **sliders)
    chart = cells.mark_rect().encode(
        x=alt.X("gpus:O", title="GPUs", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("batch:O", title="Ki tokens in a step", sort="descending"),
        color=colors("binds", BOUNDS, ["#8cc08a", "#f2b27a", "#b89acb", "#e39a9d", "#c8c8c8"]),
        tooltip=["gpus:Q", "batch:Q", "binds:N"],
    )
    return page(chart, 280)


def hosts() -> alt.Chart:
    """Lesson 16: what an all-reduce of S bytes sends out of a host, in three ways."""
    rows: Rows = []
    for count, each in product(range(2, 9), range(1, 9)):
        of_a_rank = 2 - 2 / (count * each)  # in S, on a ring of all ranks
        out = {
            "ring, ranks in blocks": of_a_rank,
            "ring, ranks cyclic": each * of_a_rank,
            "hierarchical": 2 - 2 / count,
        }
        rows += [{"hosts": count, "each": each, "way": way, "out": amount} for way, amount in out.items()]
    sliders = {"hosts": (2, 8, 2, "hosts"), "each": (1, 8, 2, "ranks in each")}
    bars = figure(rows, "Bytes that leave a host", **sliders)
    place = {
        "x": alt.X("out:Q", title="bytes out of a host, in S", scale=alt.Scale(domain=[0, 16])),
        "y": alt.Y("way:N", title=None, sort=None, axis=alt.Axis(labelLimit=130)),
    }
    numbers = bars.mark_text(align="left", dx=4, color=GREY).encode(text=alt.Text("out:Q", format=".2f"), **place)
    return page(bars.mark_bar(color=SENT_COLOR).encode(**place) + numbers, 110)


FIGURES = {make.__name__: make for make in (ring, buckets, fsdp_memory, pipeline, bounds, hosts)}


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


def colors(column: str, names: Sequence[str], shown: Sequence[str]) -> alt.Color:
    """The colours of the names in a column, with a legend above the figure."""
    scale = alt.Scale(domain=list(names), range=list(shown))
    return alt.Color(f"{column}:N", title=None, scale=scale, legend=alt.Legend(orient="top", columns=2))


def said(rows: alt.Chart, words: str) -> alt.Chart:
    """Above the figure, a sentence made of what all of its rows say alike; `words` is an expression of Vega."""
    one = rows.transform_calculate(words=words).transform_aggregate(text="min(words)")
    return one.mark_text(align="left", x=0, y=-8, color=GREY).encode(text="text:N")


def page(chart: alt.Chart | alt.LayerChart, height: int) -> alt.Chart | alt.LayerChart:
    """As wide as the page, in colours that can be read on a light and on a dark one."""
    legend = {"labelColor": GREY, "titleColor": GREY}
    axis = legend | {"domainColor": QUIET, "tickColor": QUIET, "gridColor": f"{QUIET}55"}
    size = chart.properties(width="container", height=height, background="transparent")
    return size.configure(axis=axis, legend=legend, view={"stroke": None})
