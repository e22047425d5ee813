"""Sentence pairs: where they come from, what is refused, and who works on which of them."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import datasets
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from scratch_ddp.data import Item, collate, load_pairs, sentences, tokenise
from scratch_ddp.models import build_tokenizer
from scratch_ddp.pairs import make_pairs
from scratch_ddp.sharding import Batches, shard
from scratch_ddp.sources import answers

SMALL = {"train": 12, "validation": 4, "test": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What `datasets` prepares from a folder goes with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with pairs as parquet files, as the hub's own are."""
    return write(tmp_path / "pairs")


def write(folder: Path, splits: dict | None = None) -> Path:
    folder.mkdir(parents=True)
    for split, columns in (splits or make_pairs(SMALL)).items():
        datasets.Dataset.from_dict(columns).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_built_in_pairs_look_like_mrpc(capsys):
    pairs = load_pairs("built-in")
    assert capsys.readouterr().out == "pairs: built-in (as asked); 800 train, 200 validation, 200 test\n"
    assert isinstance(pairs, datasets.DatasetDict) and list(pairs) == ["train", "validation", "test"]
    for rows in pairs.values():
        assert rows.column_names == ["sentence1", "sentence2", "label", "idx"]
        assert rows.features["label"].names == ["not_equivalent", "equivalent"]
        assert sum(rows["label"]) * 2 == len(rows), "half are paraphrases"
        assert rows["idx"][:3] == [0, 1, 2]


def test_built_in_pairs_are_the_same_everywhere_and_occur_once():
    pairs = make_pairs()
    digest = hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "f978f9cb7a3988c2"
    both = [pair for rows in pairs.values() for pair in zip(rows["sentence1"], rows["sentence2"], strict=True)]
    assert len(set(both)) == len(both) == 1200
    assert all(first != second for first, second in both)


def test_near_misses_share_most_of_their_words():
    rows = make_pairs()["train"]
    alike = {0: [], 1: []}
    for first, second, label in zip(rows["sentence1"], rows["sentence2"], rows["label"], strict=True):
        a, b = set(first.lower().split()), set(second.lower().split())
        alike[label].append(len(a & b) / len(a | b))
    means = [sum(values) / len(values) for values in alike.values()]
    assert min(means) > 0.4 and abs(means[0] - means[1]) < 0.1, "counting shared words must not tell the classes apart"


def test_a_local_folder(folder, capsys):
    pairs = load_pairs(str(folder))
    assert {split: rows[:] for split, rows in pairs.items()} == make_pairs(SMALL)
    assert "12 train, 4 validation, 4 test" in capsys.readouterr().out


def test_other_formats_and_missing_idx(tmp_path):
    for split, columns in make_pairs(SMALL).items():
        columns.pop("idx")
        datasets.Dataset.from_dict(columns).to_csv(tmp_path / f"{split}.csv")
    assert load_pairs(str(tmp_path))["validation"]["idx"][:] == [0, 1, 2, 3]


def test_the_environment_chooses_and_the_argument_wins(folder, monkeypatch, capsys):
    monkeypatch.setenv("SCRATCH_DDP_DATA", str(folder))
    assert len(load_pairs()["train"]) == 12
    assert "(as SCRATCH_DDP_DATA says)" in capsys.readouterr().out
    assert len(load_pairs("built-in")["train"]) == 800


def spoiled(tmp_path: Path, fault: str) -> str:
    pairs = make_pairs(SMALL)
    if fault == "column":
        pairs["validation"]["sentence_2"] = pairs["validation"].pop("sentence2")
    elif fault == "label":
        pairs["test"]["label"][2] = -1
    elif fault == "null":
        pairs["train"]["sentence1"][5] = None
    elif fault == "split":
        del pairs["validation"]
    elif fault == "empty":
        write(tmp_path / fault, pairs)
        empty = datasets.Dataset.from_dict(pairs["train"]).select([])
        empty.to_parquet(tmp_path / fault / "train-00000-of-00001.parquet")
        return str(tmp_path / fault)
    elif fault == "missing":
        return str(tmp_path / "nowhere")
    elif fault == "nothing":
        (tmp_path / fault).mkdir()
        return str(tmp_path / fault)
    elif fault == "format":
        del pairs["test"]
    folder = write(tmp_path / fault, pairs)
    if fault == "format":
        (folder / "test.txt").write_text("a line")
    if fault == "corrupt":
        (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    return str(folder)


FAULTS = {
    "column": "split 'validation' of {} has no column 'sentence2', only sentence1, label, idx, sentence_2",
    "label": "row 2 of split 'test' of {} is not two sentences and a label 0 or 1",
    "null": "row 5 of split 'train' of {} is not two sentences and a label 0 or 1",
    "split": "{} has no split 'validation': no file validation*",
    "empty": "split 'train' of {} is empty",
    "missing": "{} is not a folder; allowed are 'hub', 'built-in' and a folder's path",
    "nothing": "{} has no split 'train': no file train*",
    "format": "split 'test' of {}: test.txt is not one of .parquet, .csv, .json, .jsonl",
    "corrupt": "split 'train' of {} can't be read: ArrowInvalid: ",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_refused(tmp_path, fault):
    place = spoiled(tmp_path, fault)
    with pytest.raises(ValueError) as refused:
        load_pairs(place)
    assert FAULTS[fault].format(repr(place)) in str(refused.value)


def load_or_message(place) -> str:
    try:
        pairs = load_pairs(place() if callable(place) else place)
    except ValueError as error:
        dist.barrier()  # every rank got here, and the group still works
        return str(error)
    return f"{len(pairs['train'])} pairs"


@pytest.mark.parametrize("fault", ["missing", "corrupt", "column"])
def test_every_rank_refuses(tmp_path, fault):
    messages = run_ranks(2, load_or_message, spoiled(tmp_path, fault), timeout=30)
    assert len(set(messages)) == 1 and messages[0].startswith("rank 0: ")


def test_rank_0_decides_for_all(folder):
    def other_wish():
        os.environ["SCRATCH_DDP_DATA"] = str(folder) if dist.get_rank() == 0 else "built-in"

    assert run_ranks(3, load_or_message, other_wish, timeout=30) == ["12 pairs"] * 3


def test_one_line_on_rank_0(folder):
    printed = [text for _, text in run_ranks(2, load_or_message, str(folder), capture=True)]
    assert printed[0].count("\n") == 1 and printed[1] == ""


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the files of a folder as the hub does; `broken` serves the first byte and nothing more."""

    folder: Path
    broken = False

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.folder / self.path.split("/resolve/main/")[-1].split("?")[0]
        first_byte = self.headers.get("Range") == "bytes=0-0"
        if not path.is_file() or (self.broken and not first_byte):
            self.send_response(404 if not path.is_file() else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path):
    """Start a hub of our own: hub(handler attributes) -> its address."""
    servers = []

    def start(**attributes) -> str:
        handler = type("OurHub", (Hub,), {"folder": tmp_path / "hub", **attributes})
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def in_a_fresh_process(code: str, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "SCRATCH_DDP"))}
    clean |= {"HF_HOME": str(tmp_path / "cache"), "no_proxy": "127.0.0.1", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean, timeout=120)


LOAD = "from scratch_ddp.data import load_pairs; load_pairs()"


def test_the_hub_is_taken_when_it_answers_then_the_cache(tmp_path, hub):
    write(tmp_path / "hub" / "mrpc")
    address = hub()
    ran = in_a_fresh_process(f"{LOAD}; load_pairs()", tmp_path, HF_ENDPOINT=address)
    counts = "12 train, 4 validation, 4 test"
    assert ran.stdout.splitlines() == [
        f"pairs: hub (downloaded once); {counts}",
        f"pairs: hub (already on this machine); {counts}",
    ], ran.stderr
    away = in_a_fresh_process(LOAD, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == f"pairs: hub (already on this machine); {counts}\n", away.stderr


def test_a_download_that_fails_is_said_in_one_line(tmp_path, hub):
    write(tmp_path / "hub" / "mrpc")
    ran = in_a_fresh_process(LOAD, tmp_path, HF_ENDPOINT=hub(broken=True))
    assert ran.stdout.startswith("pairs: built-in (nyu-mll/glue can't be downloaded: "), ran.stderr
    assert ran.stdout.count("\n") == 1 and ran.stderr == ""


def test_a_hub_that_is_wanted_and_does_not_answer(tmp_path):
    code = "from scratch_ddp.data import load_pairs\ntry: load_pairs('hub')\nexcept ValueError as e: print(e)"
    ran = in_a_fresh_process(code, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.stdout.startswith("the hub did not answer within 2.5 s, and nyu-mll/glue is not cached"), ran.stderr
    assert ran.stderr == ""


@pytest.mark.parametrize("trouble", ["silent", "refused", "no such name", "offline"])
def test_a_hub_that_does_not_answer_costs_seconds(trouble, monkeypatch, hub):
    monkeypatch.setenv("no_proxy", "*")
    url = {"silent": "", "refused": "http://127.0.0.1:9/x", "no such name": "http://hub.invalid/x"}.get(trouble)
    if trouble == "silent":
        url = hub(do_GET=lambda self: time.sleep(5))
    if trouble == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        url = hub()
    began = time.monotonic()
    assert not answers(url or hub())
    assert time.monotonic() - began < 3


@given(st.integers(0, 60), st.integers(1, 9), st.sampled_from(["interleaved", "contiguous"]))
def test_a_shard_loses_nothing(items, world_size, kind):
    shards = [shard(range(items), rank, world_size, kind) for rank in range(world_size)]
    assert sorted(sum(shards, [])) == list(range(items))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def numbered(count: int) -> list[Item]:
    return [Item([i + 1], i % 2) for i in range(count)]


def own_rows(batch) -> list[int]:
    return batch.inputs["input_ids"][: batch.count, 0].tolist()


@settings(deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["interleaved", "contiguous"]),
)
def test_batches_lose_nothing_and_keep_ranks_in_step(items, share, world_size, shuffled, kind):
    if items < world_size:
        return
    size, seed = share * world_size, 3 if shuffled else None
    ranks = [
        list(Batches(numbered(items), size, 0, rank, world_size, kind, seed).epoch(1)) for rank in range(world_size)
    ]
    alone = list(Batches(numbered(items), size, 0, seed=seed).epoch(1))
    assert all(len(batches) == len(alone) == -(-items // size) for batches in ranks)
    for step, together in enumerate(zip(*ranks, strict=True)):
        rows = sum((own_rows(batch) for batch in together), [])
        assert all(batch.global_count == len(rows) and len(batch.labels) >= 1 for batch in together)
        if kind == "interleaved":  # the same global batch as in one process
            assert sorted(rows) == sorted(own_rows(alone[step]))
    everything = [row for batches in ranks for batch in batches for row in own_rows(batch)]
    assert sorted(everything) == list(range(1, items + 1))


def test_contiguous_shards_make_other_batches():
    together = [next(Batches(numbered(16), 4, 0, rank, 2, "contiguous").epoch()) for rank in range(2)]
    assert [own_rows(batch) for batch in together] == [[1, 2], [9, 10]]


def test_each_epoch_has_its_own_order():
    batches = Batches(numbered(16), 16, 0, seed=0)
    orders = [own_rows(next(batches.epoch(number))) for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert own_rows(next(Batches(numbered(4), 4, 0).epoch(7))) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "count, size, world_size, kind, says",
    [
        (3, 4, 4, "interleaved", "3 items can't be shared by 4 ranks"),
        (0, 4, 1, "interleaved", "0 items can't be shared by 1 ranks"),
        (9, 6, 4, "interleaved", "a global batch of 6 can't be shared evenly by 4 ranks"),
        (9, 0, 1, "interleaved", "a global batch of 0"),
        (9, 3, 1, "blocks", "kind of shard: 'blocks'; allowed are interleaved, contiguous"),
    ],
)
def test_batches_that_are_refused(count, size, world_size, kind, says):
    with pytest.raises(ValueError, match=says):
        Batches(numbered(count), size, 0, 0, world_size, kind)


def test_tokenise_separates_and_cuts_the_longer_sentence():
    rows = make_pairs(SMALL)["train"]
    tokenizer = build_tokenizer(sentences(rows))
    whole = tokenise(rows, tokenizer)
    end = tokenizer.sep_token_id
    assert [item.label for item in whole] == rows["label"]
    assert all(item.tokens.count(end) == 2 and item.tokens[-1] == end for item in whole)
    text = tokenizer.decode(whole[0].tokens[: whole[0].tokens.index(end)])
    assert text.strip() == rows["sentence1"][0]
    long = {"sentence1": ["Oslo " * 9], "sentence2": ["Oslo"], "label": [1]}
    short = len(tokenizer("Oslo")["input_ids"])
    cut = tokenise(long, tokenizer, max_length=short + 6)[0].tokens
    assert len(cut) == short + 6 and cut[4] == cut[-1] == end, "the short one keeps its words"


def test_collate_pads_on_the_right():
    inputs, labels = collate([Item([5, 6, 7], 1), Item([8], 0)], pad=0)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert labels.tolist() == [1, 0]


@pytest.mark.skipif("SCRATCH_DDP_TEST_MRPC" not in os.environ, reason="SCRATCH_DDP_TEST_MRPC names no folder with MRPC")
def test_the_real_corpus():
    pairs = load_pairs(os.environ["SCRATCH_DDP_TEST_MRPC"])
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 3668, "validation": 408, "test": 1725}
    items = tokenise(pairs["validation"], build_tokenizer(sentences(pairs["train"])))
    assert len(items) == 408 and max(len(item.tokens) for item in items) <= 256
