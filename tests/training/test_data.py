"""Sentence pairs and models: the built-in ones, those of a folder or the hub, and what is refused."""

import hashlib
import json

import datasets
import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from scratch_ddp.training.data import load_pairs
from scratch_ddp.training.models import SMOLLM2, SMOLLM2_360M, build_small, build_tokenizer, load_model
from scratch_ddp.training.pairs import make_pairs


def test_built_in_pairs_are_the_same_everywhere(capsys):
    loaded = load_pairs("built-in")
    assert capsys.readouterr().out == "pairs: built-in (as asked); 800 train, 200 validation, 200 test\n"
    pairs = make_pairs()
    assert {split: rows[:] for split, rows in loaded.items()} == pairs
    assert hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()[:16] == "f978f9cb7a3988c2"


def test_the_hub_is_asked_for_mrpc_and_smollm2(monkeypatch):
    """Up to the download: the libraries' own functions, which keep what they have downloaded."""

    def not_there(*names, **_):
        raise OSError(f"{', '.join(names)} is not cached")

    monkeypatch.setattr(datasets, "load_dataset", not_there)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", not_there)
    for load, name in ((load_pairs, "nyu-mll/glue, mrpc"), (load_model, SMOLLM2)):
        with pytest.raises(OSError, match=f"{name} is not cached"):
            load("hub")


@pytest.mark.parametrize("row", ["Rain.,,1", "Rain.,It rains.,2", "Rain.,It rains.,yes"])
def test_pairs_of_a_folder_have_two_sentences_and_the_label_0_or_1(row, tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    for split in ("train", "validation"):
        (tmp_path / f"{split}.csv").write_text(f"sentence1,sentence2,label\n{row}\n")
    with pytest.raises(ValueError, match="train: each pair needs two sentences, and the label 0 or 1"):
        load_pairs(str(tmp_path))


def test_the_small_model_has_smollm2s_architecture():
    model, tokenizer = build_small()
    config = model.config
    assert type(model) is LlamaForSequenceClassification and config.num_labels == 2
    assert config.num_attention_heads == 3 * config.num_key_value_heads, "grouped key-value heads, 15 to 5 in SmolLM2"
    assert config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    with torch.device("meta"):
        model, _ = build_small("language model", **SMOLLM2_360M)
    assert type(model) is LlamaForCausalLM and model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 361_821_120
    state = tokenizer.backend_tokenizer.to_str()
    assert hashlib.sha256(state.encode()).hexdigest()[:16] == "d31ce1111631196e", "the same in every process"
    text = "π: 3.14 €! 日本語 a\tb <pad>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]).strip() == text


def test_a_model_of_a_folder(tmp_path):
    torch.manual_seed(0)
    original, tokenizer = build_small("language model", dtype=torch.bfloat16)
    original.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    assert type(model) is LlamaForSequenceClassification and model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer("in Oslo")["input_ids"] == build_tokenizer()("in Oslo")["input_ids"]
    assert torch.equal(model.model.embed_tokens.weight, original.model.embed_tokens.weight.float())
