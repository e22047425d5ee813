"""The small model and its tokenizer, and models from a folder or the hub."""

import hashlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from scratch_ddp.training.data import collate, tokenise
from scratch_ddp.training.models import SMOLLM2, SMOLLM2_360M, build_small, build_tokenizer, load_model
from scratch_ddp.training.pairs import make_pairs
from tests.ranks import run_ranks
from tests.training.hub import in_a_fresh_process, serve_hub


def test_the_small_sibling_has_smollm2s_architecture(capsys):
    model, tokenizer = load_model("built-in")
    assert capsys.readouterr().out == "model: built-in (as asked); 0.2 M parameters\n"
    assert type(model) is LlamaForSequenceClassification and model.dtype == torch.float32
    config = model.config
    assert config.num_attention_heads == 3 * config.num_key_value_heads, "grouped key-value heads, 15 to 5 in SmolLM2"
    assert config.num_labels == 2 and config.vocab_size == len(tokenizer)
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_language_model_is_tied():
    model, _ = build_small("language model", dtype=torch.float64)
    assert type(model) is LlamaForCausalLM and model.dtype == torch.float64
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_real_size_with_random_weights():
    with torch.device("meta"):
        model, _ = build_small("language model", **SMOLLM2_360M)
    assert sum(parameter.numel() for parameter in model.parameters()) == 361_821_120


def test_the_same_seed_gives_the_same_model():
    def digest(seed):
        torch.manual_seed(seed)
        weights = torch.cat([p.detach().flatten() for p in build_small()[0].parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()

    assert digest(1) == digest(1) != digest(2)


def test_the_tokenizer_is_the_same_in_every_process():
    code = "from scratch_ddp.training.models import build_tokenizer as b; print(b().backend_tokenizer.to_str())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == build_tokenizer().backend_tokenizer.to_str() + "\n", ran.stderr


def test_no_text_is_unknown():
    tokenizer = build_tokenizer()
    for text in ("Zürich's π-day: 3.14159 €!", "日本語", "a\tb\n\nc", "<pad> <end>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]).strip() == text
    assert len(build_tokenizer(["one two three"] * 9)) < len(tokenizer) < 2048


def test_padding_does_not_change_a_prediction():
    torch.manual_seed(0)
    model, tokenizer = build_small(dtype=torch.float64)
    items = tokenise(make_pairs({"train": 9})["train"], tokenizer)
    together = model(**collate(items, tokenizer.pad_token_id)[0]).logits
    alone = torch.cat([model(**collate([item], tokenizer.pad_token_id)[0]).logits for item in items])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)  # its norms compute in float32


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder as the hub's: the small language model, saved by transformers."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model, tokenizer = build_small("language model", dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_folder(saved, monkeypatch, capfd):
    monkeypatch.setenv("SCRATCH_DDP_MODEL", str(saved))
    torch.manual_seed(0)
    model, tokenizer = load_model()
    assert type(model) is LlamaForSequenceClassification and model.score.out_features == 2
    assert model.dtype == torch.float32, "trained in float32 though it was saved in bfloat16"
    assert tokenizer("in Oslo")["input_ids"] == build_tokenizer()("in Oslo")["input_ids"]
    torch.manual_seed(0)
    original = build_small("language model", dtype=torch.bfloat16)[0]
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight.float())
    language, _ = load_model(head="language model")
    assert language.lm_head.weight is language.model.embed_tokens.weight
    captured = capfd.readouterr()
    assert captured.out.count("model: ") == 2 and "Traceback" not in captured.err


def refusal(place: str) -> str | None:
    try:
        load_model(place)
    except ValueError as error:
        dist.barrier()
        return str(error)


@pytest.mark.parametrize("fault", ["missing", "empty", "corrupt"])
def test_every_rank_refuses(tmp_path, saved, fault):
    place = tmp_path / "model"
    if fault != "missing":
        place.mkdir()
    if fault == "corrupt":
        for file in saved.iterdir():
            (place / file.name).write_bytes(file.read_bytes()[:100] if "safe" in file.name else file.read_bytes())
    messages = run_ranks(2, refusal, str(place), timeout=30)
    says = "is not a folder; allowed are" if fault == "missing" else "holds no model that can be read"
    assert messages[0] == messages[1] and messages[0].startswith(f"rank 0: '{place}' {says}")


def test_an_unknown_head():
    with pytest.raises(ValueError, match="head: 'regression'; allowed are classifier, language model"):
        load_model("built-in", head="regression")


def test_the_hub_then_the_cache(tmp_path, saved):
    code = "from scratch_ddp.training.models import load_model; load_model(); load_model('hub')"
    with serve_hub(saved) as address:
        ran = in_a_fresh_process(code, tmp_path, HF_ENDPOINT=address)
    assert ran.stdout.splitlines() == [
        f"model: {SMOLLM2.repository} (downloaded once); 0.2 M parameters",
        f"model: {SMOLLM2.repository} (as asked); 0.2 M parameters",
    ], ran.stderr
