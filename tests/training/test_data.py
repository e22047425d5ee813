"""Sentence pairs: where they come from, and what is refused."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

import datasets
import pytest
import torch.distributed as dist

from scratch_ddp.training.data import load_pairs, sentences, tokenise
from scratch_ddp.training.models import build_tokenizer
from scratch_ddp.training.pairs import make_pairs
from scratch_ddp.training.sources import answers
from tests.ranks import run_ranks
from tests.training.hub import in_a_fresh_process, serve_hub

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


LOAD = "from scratch_ddp.training.data import load_pairs; load_pairs()"


def test_the_hub_is_taken_when_it_answers_then_the_cache(tmp_path):
    with serve_hub(write(tmp_path / "hub" / "mrpc").parent) as address:
        ran = in_a_fresh_process(f"{LOAD}; load_pairs()", tmp_path, HF_ENDPOINT=address)
    counts = "12 train, 4 validation, 4 test"
    assert ran.stdout.splitlines() == [
        f"pairs: hub (downloaded once); {counts}",
        f"pairs: hub (already on this machine); {counts}",
    ], ran.stderr
    away = in_a_fresh_process(LOAD, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert away.stdout == f"pairs: hub (already on this machine); {counts}\n", away.stderr


def test_a_download_that_fails_is_said_in_one_line(tmp_path):
    with serve_hub(write(tmp_path / "hub" / "mrpc").parent, broken=True) as address:
        ran = in_a_fresh_process(LOAD, tmp_path, HF_ENDPOINT=address)
    assert ran.stdout.startswith("pairs: built-in (nyu-mll/glue can't be downloaded: "), ran.stderr
    assert ran.stdout.count("\n") == 1 and ran.stderr == ""


def test_a_hub_that_is_wanted_and_does_not_answer(tmp_path):
    code = "from scratch_ddp.training.data import load_pairs\ntry: load_pairs('hub')\nexcept ValueError as e: print(e)"
    ran = in_a_fresh_process(code, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert ran.stdout.startswith("the hub did not answer within 2.5 s, and nyu-mll/glue is not cached"), ran.stderr
    assert ran.stderr == ""


def unanswering(trouble: str, folder: Path) -> contextlib.AbstractContextManager[str]:
    """The address of a hub that does not answer; where the machine is offline, of one that would."""
    if trouble == "silent":
        return serve_hub(folder, do_GET=lambda self: time.sleep(5))
    if trouble == "offline":
        return serve_hub(folder)
    return contextlib.nullcontext({"refused": "http://127.0.0.1:9", "no such name": "http://hub.invalid"}[trouble])


@pytest.mark.parametrize("trouble", ["silent", "refused", "no such name", "offline"])
def test_a_hub_that_does_not_answer_costs_seconds(tmp_path, trouble, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    (tmp_path / "a_file").write_text("a line")
    with unanswering(trouble, tmp_path) as address:
        url = f"{address}/resolve/main/a_file"
        if trouble == "offline":
            assert answers(url), "until the machine is said to be offline"
            monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        began = time.monotonic()
        assert not answers(url)
        assert time.monotonic() - began < 3


@pytest.mark.skipif("SCRATCH_DDP_TEST_MRPC" not in os.environ, reason="SCRATCH_DDP_TEST_MRPC names no folder with MRPC")
def test_the_real_corpus():
    pairs = load_pairs(os.environ["SCRATCH_DDP_TEST_MRPC"])
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 3668, "validation": 408, "test": 1725}
    items = tokenise(pairs["validation"], build_tokenizer(sentences(pairs["train"])))
    assert len(items) == 408 and max(len(item.tokens) for item in items) <= 256
