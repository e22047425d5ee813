"""Wrong answers to the exercises of lesson 00."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "print_together": (
        WrongAnswer(
            "silences the other ranks for good",
            fails="untouched",
            says="leaves another sys.stdout behind",
            edits={
                "    elif rank == 0:": "    else:\n        if rank:\n            import io, sys\n\n"
                "            sys.stdout = io.StringIO()"
            },
        ),
        WrongAnswer(
            "compares checksums",
            fails="value",
            says="differs in all letters, and not in its CRC-32: what rank ",
            edits={"set(texts)": "set(map(__import__('zlib').crc32, map(str.encode, texts)))"},
        ),
        WrongAnswer(
            "every rank prints",
            fails="value",
            says="Rank 1, all ranks agree: what it prints is ['ready'], should be []. Ranks 2 and 3 too.",
            body="print(text)",
        ),
        WrongAnswer(
            "rank 0 speaks for all, whatever the others have",
            fails="value",
            says="Rank 0, all ranks differ, rank 0's text is empty: what it prints is [''], should be ['rank 0: ']",
            body="if rank == 0:\n    print(text)",
        ),
        WrongAnswer(
            "compares with rank 0's text only, so rank 0 never sees a difference",
            fails="value",
            says="Rank 0, all ranks differ, rank 0's text is empty: what it prints is [''], should be ['rank 0: ']",
            edits={"len(set(texts)) > 1": "text != texts[0]"},
        ),
        WrongAnswer(
            "only rank 0 asks for the texts, and waits for ever",
            fails="runs",
            says="Rank 0 did not come back: after",
            edits={"dist.all_gather_object(texts, text)": "if rank == 0:\n        dist.all_gather_object(texts, text)"},
        ),
        WrongAnswer(
            "takes texts for the same that look the same",
            fails="value",
            says="differs in how é is written: what rank",
            edits={"set(texts)": "set(__import__('unicodedata').normalize('NFC', text) for text in texts)"},
        ),
        WrongAnswer(
            "compares the beginning and the end",
            fails="value",
            says="of a text drawn with seed",
            edits={"set(texts)": "set(text[:256] + text[-256:] for text in texts)"},
        ),
        WrongAnswer(
            "takes texts for the same that differ in capital letters",
            fails="value",
            says="differs in a ",
            edits={"len(set(texts)) > 1": "len({t.strip().lower() for t in texts}) > 1"},
        ),
        WrongAnswer(
            "compares the first and the last text",
            fails="value",
            says="differs in ",
            edits={"len(set(texts)) > 1": "texts[0] != texts[-1]"},
        ),
        WrongAnswer(
            "takes it for agreement if every text is passed twice",
            fails="value",
            says=" pass differs ",
            edits={"len(set(texts)) > 1": "len(set(texts)) > 1 and min(map(texts.count, texts)) < 2"},
        ),
        WrongAnswer(
            "cuts off NUL characters, as padding",
            fails="value",
            says="differs in a NUL at its end: what rank",
            edits={"(texts, text)": "(texts, text.rstrip(chr(0)))"},
        ),
        WrongAnswer(
            "prints no text a second time",
            fails="value",
            says="all pass what was printed before: what rank 0 prints is [], should be ['ready']",
            edits={
                "    elif rank == 0:": "    elif rank == 0 and text not in vars(dist.Work).get('seen', ()):\n"
                "        dist.Work.seen = [text, *vars(dist.Work).get('seen', ())]"
            },
        ),
        WrongAnswer(
            "has one digit for the rank",
            fails="value",
            says="a long text: what rank 10 prints",
            edits={"rank {rank}:": "rank {str(rank)[0]}:"},
        ),
        WrongAnswer(
            "tidies the text up",
            fails="value",
            says=": what rank 0 prints",
            edits={"        print(text)": "        print(text.strip())"},
        ),
        WrongAnswer(
            "leaves the line open",
            fails="value",
            says="what it prints does not end with a line break",
            edits={"        print(text)": "        print(text, end='')"},
        ),
    ),
    "get": (
        WrongAnswer(
            "forgets that after the last rank comes rank 0",
            fails="value",
            says='Rank 3, get("next"): the result is 4, should be 0.',
            edits={"(dist.get_rank(group) + 1) % dist.get_world_size(group)": "dist.get_rank(group) + 1"},
        ),
        WrongAnswer(
            "counts among all ranks although a mesh is given",
            fails="value",
            says='get("next"), in a mesh of 2: ranks',
            edits={
                "dist.get_rank(group) + 1": "dist.get_rank() + 1",
                "% dist.get_world_size(group)": "% dist.get_world_size()",
            },
        ),
        WrongAnswer(
            "begins at its number among all ranks, which is right in a row of the mesh",
            fails="value",
            says='get("next"), in a mesh of 2: ranks',
            edits={"dist.get_rank(group) + 1": "dist.get_rank() + 1"},
        ),
        WrongAnswer(
            "takes parts of a key for the key",
            fails="value",
            says='unknown keys: get("n") returned, should raise ValueError',
            edits={'what == "next"': 'what in "next"'},
        ),
        WrongAnswer(
            "another error for an unknown key",
            fails="value",
            says="unknown keys: get(\"left\") raised KeyError: 'left', should raise ValueError",
            body="""
                answers = {"next": (dist.get_rank(group) + 1) % dist.get_world_size(group)}
                return answers[what]
            """,
        ),
        WrongAnswer(
            "no error for an unknown key if a mesh is given",
            fails="value",
            says='unknown keys: get("left", mesh) returned, should raise ValueError',
            edits={
                '    if what == "next":\n': '    if what == "next" or dm is not None and what not in ("ws", "pg"):\n'
            },
        ),
        WrongAnswer(
            "goes by the order of the mesh's list, not of the group",
            fails="value",
            says="in a mesh of 3: ranks",
            body="""
                if what == "next":
                    members = list(range(dist.get_world_size())) if dm is None else dm.mesh.tolist()
                    return (members.index(dist.get_rank()) + 1) % len(members)
            """,
        ),
        WrongAnswer(
            "takes the ranks of a mesh to follow one another",
            fails="value",
            says="in a mesh of 2: ranks",
            edits={"dist.get_rank(group) + 1": "dist.get_rank() - (int(dm.mesh.min()) if dm else 0) + 1"},
        ),
        WrongAnswer(
            "compares keys with `is`",
            fails="runs",
            says='get("next"): Ranks 0, 1, 2 and 3 raised ValueError: get() knows ws, pg, rank, grank, next',
            edits={'what == "next"': 'what is "next"'},
        ),
        WrongAnswer(
            "knows eight ranks at most",
            fails="value",
            says="rank 7's result is 0, should be 8",
            edits={"% dist.get_world_size(group)": "% min(dist.get_world_size(group), 8)"},
        ),
        WrongAnswer(
            "remembers the last mesh",
            fails="value",
            says="after calls with a mesh: the result is",
            body="""
                if what == "next":
                    dist.Work.last = dm or vars(dist.Work).get("last")
                    group = dist.Work.last.get_group() if dist.Work.last else group
                    return (dist.get_rank(group) + 1) % dist.get_world_size(group)
            """,
        ),
        WrongAnswer(
            "leaves a note about an unknown key in the store",
            fails="value",
            says='if there were 3 ranks, unknown keys: get("left") raised RuntimeError:',
            body="""
                if what == "next":
                    return (dist.get_rank(group) + 1) % dist.get_world_size(group)
                dist.distributed_c10d._get_default_store().set(f"unknown by {dist.get_rank()}", repr(what))
            """,
        ),
        WrongAnswer(
            "the neighbour on the other side",
            fails="value",
            says='Rank 0, get("next"): the result is 3, should be 1.',
            edits={"+ 1": "- 1"},
        ),
        WrongAnswer(
            "answers every other question with the neighbour",
            fails="value",
            says='unknown keys: get("left") returned, should raise ValueError',
            edits={'    if what == "next":\n        return': "    return"},
        ),
        WrongAnswer(
            "asks the other ranks",
            fails="cost",
            says="calls all_gather twice, budget 0 (all_gather_object is made of it)",
            body="""
                if what == "next":
                    l=[None]*dist.get_world_size(); dist.all_gather_object(l, 1)
                    return (dist.get_rank(group) + 1) % dist.get_world_size(group)
            """,
        ),
        WrongAnswer(
            "makes a group in every call",
            fails="runs",
            says="raised RuntimeError: the answer makes a process group in every call",
            edits={'    if what == "next":\n': '    if what == "next":\n        dist.new_group()\n'},
        ),
        WrongAnswer(
            "leaves a note in the store of the process group",
            fails="runs",
            says="RuntimeError: the answer uses the process group's store (set): what it writes there would stay",
            body="""
                if what == "next":
                    dist.distributed_c10d._get_default_store().set("asked", "next")
                    return (dist.get_rank(group) + 1) % dist.get_world_size(group)
            """,
        ),
    ),
}
