"""Putting ranks' output in order, naming and placing ranks: without a kernel."""

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scratch_ddp.cells.kernel.output import ERR, OUT, CellOutput, Excerpt, NotebookOutput, RankOutput, without_marks
from scratch_ddp.cells.kernel.placement import place
from scratch_ddp.cells.rank.output_streams import CellPipes
from scratch_ddp.cells.words import ClusterError, name_ranks, parse_ranks

MARK = b"0123456789abcdef"


class Tape(CellPipes):
    """A rank's output whose pipes are two strings of bytes."""

    def __init__(self):
        self.pipes = {OUT: bytearray(), ERR: bytearray()}
        super().__init__(OUT, ERR, MARK)

    def write_all(self, file, data):
        self.pipes[file] += data

    def __del__(self):
        pass


@pytest.fixture(autouse=True)
def _tape_instead_of_pipes(monkeypatch):
    from scratch_ddp.cells.rank import output_streams

    monkeypatch.setattr(output_streams, "_write_all", lambda file, data: Tape.current.write_all(file, data))


def record(said):
    """What two pipes hold after a rank has said `said`: [("stdout", text), ("stderr", text), ("display", data)]."""
    tape = Tape.current = Tape()
    places = {}
    for kind, what in said:
        if kind == "display":
            places[tape.begin_display()] = {"data": {"text/html": what}, "metadata": {}}
        else:
            tape.write(OUT if kind == "stdout" else ERR, what.encode())
    return tape.pipes, places


def joined(items):
    """Texts of one stream that follow each other, as one."""
    told = []
    for item in items:
        if item.stream == "display":
            told.append(("display", item.content["data"]["text/html"]))
        elif told and told[-1][0] == item.stream:
            told[-1] = (item.stream, told[-1][1] + item.content)
        else:
            told.append((item.stream, item.content))
    return told


texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
sayings = st.lists(st.tuples(st.sampled_from(["stdout", "stderr", "display"]), texts), max_size=8)


@given(sayings, st.data())
def test_any_chunking_of_the_pipes_gives_what_was_said_in_its_order(said, data):
    pipes, places = record(said)
    output = RankOutput(MARK)
    got = []
    to_place = sorted(places)
    left = {stream: bytes(pipe) for stream, pipe in pipes.items()}
    while any(left.values()) or to_place:
        choices = [stream for stream in left if left[stream]] + (["display"] if to_place else [])
        chosen = data.draw(st.sampled_from(choices))
        if chosen == "display":
            place_ = to_place.pop(0)
            output.add_display(place_, places[place_])
        else:
            size = data.draw(st.integers(1, len(left[chosen])))
            output.read(chosen, left[chosen][:size])
            left[chosen] = left[chosen][size:]
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


def test_bytes_that_are_no_text_and_marks_that_are_none_do_not_get_lost():
    output = RankOutput(MARK)
    output.read(OUT, b"a\0b\xff c\0" + MARK[:5])
    output.close()
    assert joined(output.take()) == [("stdout", "a\0b� c\0" + MARK[:5].decode())]
    assert without_marks(b"a\0b\0" + MARK + b" 7 2\0c", MARK) == "a\0bc"


@given(st.lists(st.text("ab\n").map(str.encode)), st.integers(0, 9), st.integers(1, 9))
def test_an_excerpt_depends_on_nothing_but_what_was_written(chunks, first, last):
    def excerpt_of(chunks):
        excerpt = Excerpt(first, last)
        for chunk in chunks:
            excerpt.add(chunk)
        return excerpt.take() + excerpt.rest()

    whole = b"".join(chunks)
    told = excerpt_of(chunks)
    assert told == excerpt_of([whole])
    if len(whole) <= first + last:
        assert told == whole
    else:
        assert told.startswith(whole[:first] + "\n… ".encode())
        end = told.rpartition(" left out …\n".encode())[2]
        assert whole.endswith(end) and len(end) <= last


def present(monkeypatch, *ranks):
    """The text on the screen after ranks have said their parts ((rank, text), … or (rank, None) for its end)."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    cell = CellOutput(sorted({rank for rank, _ in ranks}), MARK, NotebookOutput(attended=False))
    seen = []
    for rank, text in ranks:
        if text is None:
            cell.close(rank)
        else:
            cell.of_rank[rank].read(OUT, text.encode())
        cell.update()
        seen.append(out.getvalue())
    cell.finish()
    return out.getvalue(), seen


def test_equal_ranks_become_one_block_in_any_order_of_arrival(monkeypatch):
    one, _ = present(monkeypatch, (0, "x\n"), (1, "x"), (0, None), (1, "\n"), (1, None))
    other, _ = present(monkeypatch, (1, "x\n"), (1, None), (0, "x\n"), (0, None))
    assert one == other == "x   ← ranks 0–1\n"


def test_the_lowest_rank_is_live_and_the_others_wait_for_their_turn(monkeypatch):
    text, seen = present(monkeypatch, (1, "b\n"), (0, "a1\n"), (0, "a2\n"), (1, None), (0, None))
    assert seen[0] == "" and "a1" in seen[1] and "b" not in seen[3]
    assert text == "a1\na2\n↑ rank 0\nb   ← rank 1\n"


def test_a_passing_line_is_taken_away_by_backspaces_and_never_shown_to_nobody(monkeypatch):
    for attended, expected in ((True, " wait" + "\b" * 5 + "done\n"), (False, "done\n")):
        out = io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        notebook = NotebookOutput(attended)
        notebook.show_passing(" wait")
        notebook.note("done")
        assert out.getvalue() == expected


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("[0]", [0]), ("0", [0]), (" [ 2 , 0 ] ", [0, 2]), ("[0-2]", [0, 1, 2]), ("[0–1,3]", [0, 1, 3]), ("1,2", [1, 2])],
)
def test_rank_lists(text, ranks):
    assert parse_ranks(text, 4) == ranks


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *[("", "empty"), ("[]", "empty"), ("[9]", "no rank 9"), ("[0,0]", "rank 0 is listed twice"), ("[a]", "'a'")],
        *[("[2-0]", "backwards"), ("[0", "unbalanced"), ("[0-1,1]", "rank 1 is listed twice"), ("[-1]", "'-1'")],
    ],
)
def test_rank_lists_that_can_not_be_meant(text, why):
    with pytest.raises(ClusterError, match=why) as raised:
        parse_ranks(text, 4)
    assert "Write %%rank [0]" in str(raised.value) and "4 ranks, 0 to 3" in str(raised.value)


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
        ((2, 4, None, None, "gloo"), "gloo", [0, 1], "rank 0 on GPU 0, rank 1 on GPU 1, over gloo"),
        ((3, 2, None, None, None), "interruptible", [0, 1, 0], "2 GPU(s) shared in turn by 3 ranks"),
        ((1, 0, None, None, "gloo"), "gloo", [None], "over gloo"),
    ],
)
def test_placement(arguments, backend, gpus, why):
    placement = place(*arguments)
    assert (placement.backend, placement.gpus) == (backend, gpus)
    assert why in placement.why


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((2, 0, "0", None, None), "--gpu-ids 0: torch finds no GPU"),
        ((2, 2, "0,5", None, None), "there is no GPU 5. This machine has 2"),
        ((2, 2, "0,x", None, None), "not a list of numbers"),
        ((2, 2, "0,0", None, None), "a GPU is listed twice"),
        ((2, 2, "0", "cpu", None), "contradict each other"),
        ((2, 0, None, "cuda", None), "torch finds no GPU here"),
        ((2, 0, None, None, "nccl"), "needs a GPU for each rank"),
        ((3, 2, None, None, "nccl"), "NCCL refuses two ranks on one GPU"),
    ],
)
def test_placements_that_can_not_be(arguments, why):
    with pytest.raises(ClusterError) as raised:
        place(*arguments)
    assert why in str(raised.value)
