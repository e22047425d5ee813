"""A transformer's sizes, read from its config without its weights: how many parameters it has, and where they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3")
_GPT2_NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_DEEPSEEK = ("moe_intermediate_size", "first_k_dense_replace", "n_routed_experts", "n_shared_experts")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
_MORE_SIZES = {"mixtral": ("num_local_experts",), "deepseek_v3": (*_DEEPSEEK, "qk_nope_head_dim", *_LATENT)}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """A model of equal blocks, each with an attention (none if `heads` is 0) and an MLP, between embedding and head.

    width: of the residual stream · inner: of the MLP · kv_heads: heads of keys and values, fewer than `heads` in
    grouped-query attention · vocabulary: 0 for a model without embedding and head · tied: these two are one matrix ·
    positions: of a learned position embedding · mlp_matrices: 3 for a gated MLP, else 2 · norm_vectors: of each of a
    block's two norms, 2 with a bias, 0 without norms · saved_in_mlp: tensors of width `inner` that the MLP saves for
    backward · experts, active_experts: of a mixture, in all and for a token; `inner` is then an expert's ·
    shared_experts: how many more each token passes · dense_blocks, dense_inner: the first blocks, which have no
    mixture · latent: the four ranks and widths of DeepSeek's attention (queries', keys' and values', with a position,
    values), whose `head_width` is that without a position. Raises ValueError for a size that can't be.
    """

    name: str
    blocks: int
    width: int
    inner: int
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    vocabulary: int = 0
    tied: bool = False
    positions: int = 0
    mlp_matrices: int = 3
    norm_vectors: int = 1
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    saved_in_mlp: int = 4
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    dense_blocks: int = 0
    dense_inner: int = 0
    latent: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} must be 1 or more, not {getattr(self, name)}")
        if self.heads and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"{self.name}: {self.heads} heads can't share {self.kv_heads} of keys and values evenly")

    @property
    def attention(self) -> int:
        """Parameters of a block's attention: four matrices, and their biases."""
        if not self.heads:
            return 0
        if self.latent:
            return self._latent_attention()
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        biases = (query + 2 * key) * self.qkv_bias + self.width * self.out_bias
        return 2 * self.width * (query + key) + biases + 2 * self.head_width * self.head_norms

    def _latent_attention(self) -> int:
        """DeepSeek-V2, section 2.1: queries, keys and values through narrow matrices, each with a norm of its own."""
        query_rank, key_rank, turned, value = self.latent
        queries = self.width * query_rank + query_rank * self.heads * (self.head_width + turned)
        keys = self.width * (key_rank + turned) + key_rank * self.heads * (self.head_width + value)
        return queries + keys + self.heads * value * self.width + query_rank + key_rank

    @property
    def norms(self) -> int:
        """Parameters of a block's norms."""
        return 2 * self.norm_vectors * self.width

    def _mlp(self, inner: int) -> int:
        biases = ((self.mlp_matrices - 1) * inner + self.width) * self.mlp_bias
        return self.mlp_matrices * self.width * inner + biases

    @property
    def block(self) -> int:
        """Parameters of a block, of a mixture's if there is one."""
        router = self.experts * self.width
        return self.attention + self.norms + self._mlp(self.inner) * (self.experts + self.shared_experts or 1) + router

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, with the positions'."""
        return (self.vocabulary + self.positions) * self.width

    @property
    def head(self) -> int:
        """Parameters of the head, though a tied one shares them with the embedding."""
        return self.vocabulary * self.width

    @property
    def last_norm(self) -> int:
        """Parameters of the norm before the head."""
        return self.norm_vectors * self.width if self.vocabulary else 0

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        dense = self.dense_blocks * (self.attention + self.norms + self._mlp(self.dense_inner))
        outside = self.embedding + self.last_norm + self.head * (not self.tied)
        return (self.blocks - self.dense_blocks) * self.block + dense + outside

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes: without the experts that are not for it."""
        idle = (self.experts - self.active_experts) * self._mlp(self.inner)
        return self.parameters - (self.blocks - self.dense_blocks) * idle


def from_config(config: Any, name: str = "") -> ModelShape:
    """Return the shape that a transformers config describes: a dict, an object, or the path of a config.json.

    The path may be that of the folder that has it.

    Knows models like Llama and GPT-2, with mixtures of experts. Raises ValueError, naming what is missing or unknown,
    for any other: a wrong count would be worse than none.
    """
    if isinstance(config, str | Path):
        name, config = name or Path(config).parent.name, _read(Path(config))
    sizes = dict(config if isinstance(config, Mapping) else config.to_dict())
    kind = sizes.get("model_type", "llama")
    name = name or str(sizes.get("_name_or_path") or kind)
    if kind not in (*_LLAMA_LIKE, "gpt2"):
        known = ", ".join((*_LLAMA_LIKE, "gpt2"))
        raise ValueError(f"model_type {kind!r} is not known: its parameters can't be counted; known are {known}")
    if kind == "gpt2":
        sizes |= {ours: sizes[theirs] for theirs, ours in _GPT2_NAMES.items() if theirs in sizes}
        sizes["intermediate_size"] = sizes.get("n_inner") or 4 * sizes.get("hidden_size", 0)
    needed = (*_SIZES, *_MORE_SIZES.get(kind, ()))
    if missing := [size for size in needed if not isinstance(sizes.get(size), int)]:
        raise ValueError(f"the config has no {' and no '.join(missing)}: these sizes are needed")
    if wrong := [size for size in _SIZES if sizes[size] < 1]:
        raise ValueError(f"{wrong[0]} must be 1 or more, not {sizes[wrong[0]]}")
    return _gpt2(sizes, name) if kind == "gpt2" else _llama(sizes, name, kind)


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no config, but a {type(found).__name__}")
    return found


def _common(sizes: Mapping[str, Any], name: str) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    return {
        "name": name,
        "blocks": sizes["num_hidden_layers"],
        "width": sizes["hidden_size"],
        "inner": sizes["intermediate_size"],
        "heads": heads,
        "kv_heads": sizes.get("num_key_value_heads") or heads,
        "head_width": sizes.get("head_dim") or sizes["hidden_size"] // heads,
        "vocabulary": sizes["vocab_size"],
    }


def _gpt2(sizes: Mapping[str, Any], name: str) -> ModelShape:
    return ModelShape(
        **_common(sizes, name),
        tied=sizes.get("tie_word_embeddings", True),
        positions=sizes.get("n_positions", 1024),
        mlp_matrices=2,
        norm_vectors=2,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        saved_in_mlp=5,  # of gelu_new, which is made of simple operations
    )


def _llama(sizes: Mapping[str, Any], name: str, kind: str) -> ModelShape:
    found = _common(sizes, name) | {"tied": bool(sizes.get("tie_word_embeddings", False))}
    bias = bool(sizes.get("attention_bias", False))
    found |= {"qkv_bias": bias or kind == "qwen2", "out_bias": bias and kind != "qwen2", "head_norms": kind == "qwen3"}
    found["mlp_bias"] = bool(sizes.get("mlp_bias", False))
    if experts := sizes.get("num_local_experts") or sizes.get("n_routed_experts"):
        found |= {"experts": experts, "active_experts": sizes.get("num_experts_per_tok", 2)}
    if kind == "deepseek_v3":
        found |= {"inner": sizes["moe_intermediate_size"], "dense_inner": sizes["intermediate_size"]}
        found |= {"dense_blocks": sizes["first_k_dense_replace"], "shared_experts": sizes["n_shared_experts"]}
        found["head_width"] = sizes["qk_nope_head_dim"]
        found["latent"] = tuple(sizes[each] for each in _LATENT)
    return ModelShape(**found)
