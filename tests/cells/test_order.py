"""Putting ranks' output in order, naming and placing ranks: without a kernel."""

import json
import os
import select
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scratch_ddp.cells.kernel.output import ERR, OUT, RankOutput
from scratch_ddp.cells.kernel.placement import Placement, place
from scratch_ddp.cells.kernel.rank_process import RankProcess
from scratch_ddp.cells.rank.output_streams import CellPipe
from scratch_ddp.cells.words import ClusterError, name_ranks, parse_ranks

MARK = b"0123456789abcdef"


def record(said):
    """The bytes in the pipe after a rank has said `said`: [("stdout", text), ("stderr", text), ("display", data)]."""
    read_end, write_end = os.pipe()
    writer = threading.Thread(target=_say, args=(CellPipe(write_end, MARK), said))
    writer.start()  # a pipe holds less than a long display
    with open(read_end, "rb") as written:
        return written.read()


def _say(pipe, said):
    for kind, what in said:
        if kind == "display":
            pipe.display({"data": {"text/html": what}, "metadata": {}})
        else:
            pipe.write(OUT if kind == "stdout" else ERR, what.encode())


def joined(items):
    """Texts of one stream that follow each other, as one."""
    told = []
    for item in items:
        if item.stream == "display":
            told.append(("display", json.loads(item.content)["data"]["text/html"]))
        elif told and told[-1][0] == item.stream:
            told[-1] = (item.stream, told[-1][1] + item.content)
        else:
            told.append((item.stream, item.content))
    return told


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
sayings = st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "display"]), texts), max_size=8)


@settings(max_examples=50)
@given(sayings, st.data())
def test_any_chunking_of_the_pipe_gives_what_was_said_in_its_order(said, data):
    left = record(said)
    output = RankOutput(MARK)
    got = []
    while left:
        size = data.draw(st.integers(1, len(left)))
        output.read(left[:size])
        left = left[size:]
        got += output.take()
    output.close()
    got += output.take()
    expected = []
    for kind, text in said:
        if kind != "display" and expected and expected[-1][0] == kind:
            expected[-1] = (kind, expected[-1][1] + text)
        else:
            expected.append((kind, text))
    assert joined(got) == expected


def test_a_display_keeps_whole_among_what_others_write_to_the_same_pipe():
    data = "<p>" + "é" * 100_000
    written = record([("display", data)])
    frames = [b"\0" + frame + b"\0" for frame in written[1:-1].split(b"\0\0")]
    assert max(map(len, frames)) <= select.PIPE_BUF, "others could write into it"
    output = RankOutput(MARK)
    output.read(b"x\n".join(frames))
    output.close()
    assert joined(output.take()) == [("stdout", "x\n" * (len(frames) - 1)), ("display", data)]


def test_of_late_displays_no_piece_is_shown_and_all_are_counted_as_text():
    late = RankOutput(MARK, late=True)
    written = record([("display", "x" * 10_000)])
    late.read(written[written.index(b"\0\0") + 1 :])  # it has begun in its cell
    late.close()
    assert joined(late.take()) == [("stdout", "<a display>\n")]
    late = RankOutput(MARK, late=True)
    for _ in range(5_000):
        late.read(written)
    late.close()
    assert sum(len(item.content) for item in late.take()) < 20_000


@pytest.mark.parametrize("size", [100, 5_000, 30_000])
def test_the_last_words_of_a_rank_hold_no_marks(size):
    process = RankProcess(0, None, None, 0)
    said = [("stdout", "hello\0world\n"), ("stderr", "careful\n"), ("display", "x" * size), ("stdout", "bye\n")]
    process.remember_output(0, record(said))
    text = "\n".join(process.last_lines(MARK))
    assert text.endswith("bye\n") and "x" not in text and MARK.decode() not in text
    assert size > 5_000 or text == "hello\0world\ncareful\nbye\n"


def test_bytes_that_are_no_text_and_marks_that_are_none_do_not_get_lost():
    output = RankOutput(MARK)
    output.read(b"a\0b\xff c\0" + MARK[:5])
    output.close()
    assert joined(output.take()) == [("stdout", "a\0b� c\0" + MARK[:5].decode())]


def test_of_a_long_stream_the_beginning_is_kept():
    whole = "äb\n" * 100_000
    for size in (1, 7, 1000, len(whole)):
        output = RankOutput(MARK, most=401)
        for start in range(0, len(whole), size):
            output.read(whole[start : start + size].encode())
        output.close()
        assert joined(output.take()) == [("stdout", whole[:300] + "\n… 0.4 MB left out …\n")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("[0]", [0]), ("0", [0]), (" [ 2 , 0 ] ", [0, 2]), ("[0-2]", [0, 1, 2]), ("[0–1,3]", [0, 1, 3])],
        *[("1,2", [1, 2]), ("[0,0-1]", [0, 1]), ("[9]", "no rank 9"), ("", "''"), ("[a]", "'[a]'"), ("[]", "'[]'")],
        *[("[3-1]", "'[3-1]'"), ("[1-0,1]", "'[1-0,1]'"), ("[0-99999999999999]", "no rank 4")],
        *[("[-1]", "'[-1]'"), ("[0,]", "'[0,]'"), ("[0-]", "'[0-]'")],
    ],
)
def test_rank_lists(text, found):
    try:
        assert parse_ranks(text, 4) == found
    except ClusterError as error:
        assert found in str(error) and "Write %%rank [0]" in str(error) and "4 ranks, 0 to 3" in str(error)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_names_of_ranks_can_be_read_back(ranks):
    name = name_ranks(ranks)
    assert parse_ranks(name.split(" ", 1)[1], 41) == sorted(ranks)
    assert name.startswith("rank " if len(ranks) == 1 else "ranks ")


@pytest.mark.parametrize(
    ("arguments", "backend", "gpus", "why"),
    [
        ((2, 0, None, None, None), "interruptible", [None, None], "on the CPU (there is no GPU here), over gloo"),
        ((2, 4, None, "cpu", None), "interruptible", [None, None], "on the CPU (--device cpu), over gloo"),
        ((2, 4, None, None, None), "nccl", [0, 1], "rank 0 on GPU 0, rank 1 on GPU 1, over nccl"),
        ((2, 4, "3,1", None, None), "nccl", [3, 1], "rank 0 on GPU 3, rank 1 on GPU 1, over nccl"),
        ((3, 2, None, None, None), "interruptible", [0, 1, 0], "2 GPU(s) shared in turn by 3 ranks"),
        ((1, 0, None, None, "gloo"), "gloo", [None], "over gloo"),
        ((2, 0, "0", None, None), "refused", [], "--gpu-ids 0: write numbers of the 0 GPU(s) here"),
        ((2, 2, "0,5", None, None), "refused", [], "each once"),
        ((2, 2, "0,0", None, None), "refused", [], "each once"),
        ((2, 2, "0", "cpu", None), "refused", [], "contradict each other"),
        ((2, 0, None, "cuda", None), "refused", [], "torch finds no GPU here"),
        ((2, 0, None, None, "nccl"), "refused", [], "needs a GPU for each rank"),
        ((3, 2, None, None, "nccl"), "refused", [], "NCCL refuses two ranks on one GPU"),
    ],
)
def test_placement(arguments, backend, gpus, why):
    try:
        placement = place(*arguments)
    except ClusterError as error:
        placement = Placement("refused", [], str(error))
    assert (placement.backend, placement.gpus) == (backend, gpus)
    assert why in placement.why
