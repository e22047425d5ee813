"""The pages for engineers: their scripts run, and each limit is the sentence that the code prints."""

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

from tests.ranks import printed_under_torchrun

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
ENGINEERS = (ROOT / "scratch_ddp/README.md").read_text()


def script(name: str) -> str:
    scripts = re.findall(r"```python\n(.*?)```", README + ENGINEERS, re.DOTALL)
    return next(code for code in scripts if code.startswith(f"# {name}"))


def run(name: str, folder: Path, world_size: int = 2) -> list[str]:
    """What each rank prints when torchrun starts the script in the folder."""
    (folder / name).write_text(script(name))

    def rank_main():
        os.chdir(folder)
        torch.manual_seed(0)
        runpy.run_path(name, run_name="__main__")

    return printed_under_torchrun(world_size, rank_main)


def test_data_parallelism_with_accumulation_and_clipping(tmp_path):
    first, second = run("train_ddp.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (.*)", first)]
    assert len(losses) == 10 and losses[-1] < losses[0] / 5 and second == ""
    assert len(torch.load(tmp_path / "model.pt")) == 4


def test_a_sharded_model_that_is_saved_and_resumed(tmp_path):
    pytest.importorskip("transformers")
    expected = "[5, 6, 7, 8, 9, 10, 11, 12]"
    for start, ranks in ((0, 2), (30, 3)):
        if start:  # as a save leaves it that is killed while it replaces the checkpoint
            (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.before")
        for rank, printed in enumerate(run("train_fsdp.py", tmp_path, ranks)):
            assert printed == f"rank {rank} starts at step {start}\nrank {rank}: {expected}\n"


def test_limits_are_sentences_of_the_code():
    limits = re.findall(r"^\| .* \| \[(.*)\]\((.*\.py)\) \|$", ENGINEERS, re.MULTILINE)
    assert len(limits) > 10
    for sentence, path in limits:
        code = re.sub(r'"\s*\n\s*f?"', "", (ROOT / "scratch_ddp" / path).read_text())
        assert sentence in code, (sentence, path)


def test_the_versions_it_names_are_those_of_the_workflow_and_the_requirements():
    oldest, newest, torchs = re.search(r"tested: Python (.*) to (.*) with torch ([\d.]*);", README).groups()
    tested = re.findall(
        r'"(3\.\d+)"', re.search(r"python: (\[.*\])", (ROOT / ".github/workflows/ci.yml").read_text())[1]
    )
    assert [oldest, newest] == [tested[0], tested[-1]]
    assert f"\ntorch=={torchs}." in (ROOT / "requirements.txt").read_text()
