"""A transformer's sizes, read from its config without its weights: parameters, operations, and what a forward saves.

Sources: J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020 (6 N operations a token); A. Chowdhery
et al., "PaLM", 2022, appendix B (the attention's). Saved are the tensors that torch saves for models of transformers'
code: each once, however many operations need it, with an attention that does not keep its scores (`sdpa`), and norms
that compute in float32.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_LLAMA_LIKE = ("llama", "mistral")  # and GPT-2: the formulas; transformers' own classes are built for all others
_GPT2_NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_FLOAT32 = 4


@dataclass(frozen=True)
class ModelShape:
    """A model of equal blocks, each with an attention (none if `heads` is 0) and an MLP, between embedding and head.

    width: of the residual stream · inner: of the MLP · kv_heads: heads of keys and values, fewer than `heads` in
    grouped-query attention · vocabulary: 0 for a model without embedding and head · tied: these two are one matrix ·
    positions: of a learned position embedding · mlp_matrices: 3 for a gated MLP, else 2 · norm_vectors: of each of a
    block's two norms, 2 with a bias, 0 without norms · saved_in_mlp: tensors of width `inner` that the MLP saves for
    backward. If the parameters were counted, not computed: in_blocks: of all blocks · active_in_blocks: of these the
    ones that a token passes, fewer in a mixture of `experts` · beside: of what is no part of the text model. Raises
    ValueError for a size that can't be.
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
    attention_bias: bool = False
    mlp_bias: bool = False
    saved_in_mlp: int = 4
    in_blocks: int = 0
    active_in_blocks: int = 0
    experts: int = 0
    beside: int = 0

    def __post_init__(self) -> None:
        for name in ("blocks", "width", "inner"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} must be 1 or more, not {getattr(self, name)}")
        if self.heads and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"{self.name}: {self.heads} heads can't share {self.kv_heads} of keys and values evenly")

    @property
    def attention(self) -> int:
        """Parameters of a block's attention: four matrices, and their biases."""
        query, key = self.heads * self.head_width, self.kv_heads * self.head_width
        return 2 * self.width * (query + key) + (query + 2 * key + self.width) * bool(
            self.heads and self.attention_bias
        )

    @property
    def norms(self) -> int:
        """Parameters of a block's norms."""
        return 2 * self.norm_vectors * self.width

    @property
    def block(self) -> int:
        """Parameters of a block; the average, if they were counted."""
        if self.in_blocks:
            return round(self.in_blocks / self.blocks)
        biases = ((self.mlp_matrices - 1) * self.inner + self.width) * self.mlp_bias
        return self.attention + self.norms + self.mlp_matrices * self.width * self.inner + biases

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
    def outside(self) -> int:
        """Parameters of embedding, last norm and head, a shared matrix counted once."""
        return self.embedding + self.last_norm + self.head * (not self.tied)

    @property
    def parameters(self) -> int:
        """All parameters, each counted once."""
        return (self.in_blocks or self.blocks * self.block) + self.outside + self.beside

    @property
    def active_parameters(self) -> int:
        """Parameters of the text model that a token passes: without the experts that are not for it."""
        return (self.active_in_blocks or self.blocks * self.block) + self.outside


def from_config(config: Any, name: str = "") -> ModelShape:
    """Return the shape that a transformers config describes: a dict, an object, or the path of a config.json.

    The path may be that of the folder that has it. Models like Llama and GPT-2 are computed; of all others the class in
    transformers is built without memory (on the meta device), and its parameters are counted; the blocks' activations
    are taken for a Llama's. Raises ValueError, saying what is missing or wrong, if that can't be done: a wrong count
    would be worse than none.
    """
    if isinstance(config, str | Path):
        name, config = name or Path(config).parent.name, _read(Path(config))
    sizes = dict(config if isinstance(config, Mapping) else config.to_dict())
    kind = sizes.get("model_type") or _kind_of_class(sizes)
    name = name or str(sizes.get("_name_or_path") or kind)
    if kind not in (*_LLAMA_LIKE, "gpt2"):
        return _counted(sizes, kind, name)
    if kind == "gpt2":
        sizes |= {ours: sizes[theirs] for theirs, ours in _GPT2_NAMES.items() if theirs in sizes}
        sizes["intermediate_size"] = sizes.get("n_inner") or 4 * sizes.get("hidden_size", 0)
    if missing := [size for size in _SIZES if not isinstance(sizes.get(size), int)]:
        raise ValueError(f"the config has no {' and no '.join(missing)}: these sizes are needed")
    if wrong := [size for size in _SIZES if sizes[size] < 1]:
        raise ValueError(f"{wrong[0]} must be 1 or more, not {sizes[wrong[0]]}")
    common = _common(sizes, name)
    if kind == "gpt2":
        tied, positions = sizes.get("tie_word_embeddings", True), sizes.get("n_positions", 1024)
        more = {"mlp_matrices": 2, "norm_vectors": 2, "attention_bias": True, "mlp_bias": True}
        return ModelShape(**common, **more, tied=tied, positions=positions, saved_in_mlp=5)  # gelu_new has five steps
    biases = {each: bool(sizes.get(each, False)) for each in ("attention_bias", "mlp_bias")}
    return ModelShape(**common, **biases, tied=bool(sizes.get("tie_word_embeddings", False)))


def _read(path: Path) -> Mapping[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no config, but a {type(found).__name__}")
    return found


def _class_of(sizes: Mapping[str, Any]) -> Any:
    import transformers  # a second and more, which the formulas do without

    return getattr(transformers, (sizes.get("architectures") or [""])[0], None)


def _kind_of_class(sizes: Mapping[str, Any]) -> str:
    """The model_type of the class in `architectures`."""
    if found := _class_of(sizes):
        return found.config_class.model_type
    raise ValueError("the config has no model_type, and no architectures that transformers knows: add one of them")


def _counted(sizes: Mapping[str, Any], kind: str, name: str) -> ModelShape:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.for_model(kind, **{key: value for key, value in sizes.items() if key != "model_type"})
        with torch.device("meta"):
            found = _class_of(sizes)
            model = found._from_config(config) if found else AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever their classes say of sizes that are missing or don't fit
        raise ValueError(f"transformers can't build model_type {kind!r} from this config: {error}") from error
    text = config.get_text_config()
    common = _common(text.to_dict(), name)
    lists = [
        each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == common["blocks"]
    ]
    layers = max(lists, key=_parameters)  # a vision tower may have as many
    sizes = text.to_dict()
    experts = next((sizes[each] for each in _EXPERTS if sizes.get(each)), 0)
    idle = 0
    if experts:
        of_experts = sum(p.numel() for path, p in layers.named_parameters() if ".experts." in path)
        idle = of_experts - of_experts * sizes["num_experts_per_tok"] // experts
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shape = ModelShape(
        **common,
        tied=head is None or head.weight is embedding.weight,
        in_blocks=_parameters(layers),
        active_in_blocks=_parameters(layers) - idle,
        experts=experts,
    )
    return ModelShape(**{**vars(shape), "beside": _parameters(model) - shape.parameters})


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _common(sizes: Mapping[str, Any], name: str) -> dict[str, Any]:
    heads = sizes["num_attention_heads"]
    return {
        "name": name,
        "blocks": sizes["num_hidden_layers"],
        "width": sizes["hidden_size"],
        "inner": sizes["intermediate_size"],
        "heads": heads,
        "kv_heads": sizes.get("num_key_value_heads") or heads,
        "head_width": _head_width(sizes),
        "vocabulary": sizes["vocab_size"],
    }


def _head_width(sizes: Mapping[str, Any]) -> int:
    """Of a query and a value, on average: in DeepSeek's attention they differ."""
    if value := sizes.get("v_head_dim"):
        return (sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] + value) // 2
    return sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]


def forward_flops_of_block(shape: ModelShape, sequence: int) -> float:
    """Operations of a block's forward for a token: two for each weight, and the attention's for each token it sees.

    The attention's are counted as if each token saw the whole `sequence`. A causal one may leave out half of them.
    """
    weights = (shape.active_in_blocks / shape.blocks if shape.active_in_blocks else shape.block) - shape.norms
    return 2 * weights + 4 * sequence * shape.heads * shape.head_width


def forward_flops_of_head(shape: ModelShape) -> float:
    """Operations of the head's forward for a token. The embedding only looks up."""
    return 2 * shape.head


def flops_per_token(shape: ModelShape, sequence: int, recomputes: bool = False) -> float:
    """Operations of forward and backward for a token of a sequence: the backward takes two forwards.

    About 6 N for N parameters, and 12 · blocks · width · sequence. Of a mixture only the active experts count.
    `recomputes`: with checkpointing each block's forward is done twice, which is work but no progress.
    """
    blocks = shape.blocks * forward_flops_of_block(shape, sequence)
    return (4 if recomputes else 3) * blocks + 3 * forward_flops_of_head(shape)


def bytes_per_token(shape: ModelShape, element: int = 2, checkpointing: bool | str = False, tp: int = 1) -> float:
    """Bytes that a block saves for each token, on each of `tp` ranks that share it (sequence parallelism included).

    `element`: bytes of a number. With `checkpointing` only a block's input is kept. If it is "selective", what matrices
    and the attention put out is kept, and norms and the MLP's activation are done again. Raises ValueError for a
    mixture of experts: its bytes hang on which experts the tokens choose.
    """
    refuse_mixture(shape, "activations")
    if checkpointing is True:
        return element * shape.width / tp
    query, key = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = (
        element * (2 * query + 2 * key) + _FLOAT32 * shape.heads
    )  # q, k, v, output; a sum of exponentials a head
    if checkpointing == "selective":
        return (element * (2 * shape.width + (shape.mlp_matrices - 1) * shape.inner) + attention) / tp
    mlp = element * shape.saved_in_mlp * shape.inner
    if not shape.heads:
        return (element * shape.width + mlp) / tp
    return (_of_norms(shape, element) + attention + mlp) / tp


def _of_norms(shape: ModelShape, element: int) -> float:
    """Of two norms: their inputs, what normalises them, and the inputs of the matrices behind them."""
    if shape.norm_vectors == 2:  # LayerNorm: mean and deviation
        return 2 * (2 * element * shape.width + 2 * element)
    # RMSNorm: x in float32, x normalised, and that times the weight, which is the input of the matrices
    return 2 * (_FLOAT32 * shape.width + _FLOAT32 + 2 * element * shape.width)


def logits_bytes(shape: ModelShape, tokens: int, element: int = 2, tp: int = 1) -> float:
    """Bytes at the loss, at its peak: the logits, and in float32 these, their logarithms and the gradient."""
    return (element + 3 * _FLOAT32) * shape.vocabulary * tokens / tp


def refuse_mixture(shape: ModelShape, what: str) -> None:
    """Raise ValueError if the shape has a mixture of experts."""
    if shape.experts:
        raise ValueError(f"{shape.name} is a mixture of experts: its {what} can't be forecast here, its parameters can")
