"""A transformer's sizes, read from its config without its weights: parameters, operations, and what a forward saves.

Sources: J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020 (6 N operations a token); A. Chowdhery
et al., "PaLM", 2022, appendix B (the attention's). Saved are the tensors that torch saves for transformers' models,
each once, with an attention that does not keep its scores (`sdpa`), and norms that compute in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GPT_2 = {"mlp_matrices": 2, "norm_vectors": 2, "biases": True, "saved_in_mlp": 5}  # gelu_new has five steps
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_FLOAT32 = 4


@dataclass(frozen=True)
class ModelShape:
    """A model of equal blocks, each with an attention (none if `heads` is 0) and an MLP, between embedding and head.

    width: of the residual stream · inner: of the MLP · kv_heads: heads of keys and values · vocabulary: 0 without
    embedding and head · tied: these two are one matrix · positions: of a learned position embedding · mlp_matrices: 3
    for a gated MLP · norm_vectors: of each of a block's two norms, 2 with a bias, 0 without norms · saved_in_mlp:
    tensors of width `inner` that the MLP saves for backward · fused_norms: they save their input and output alone. If
    the parameters were counted: in_blocks: of all blocks · idle: of these, what a token does not pass in a mixture of
    experts · beside: of what is no part of the text model.
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
    biases: bool = False
    saved_in_mlp: int = 4
    fused_norms: bool = False
    in_blocks: int = 0
    idle: int = 0
    beside: int = 0

    @property
    def norms(self) -> int:
        """Parameters of a block's norms."""
        return 2 * self.norm_vectors * self.width

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """A block's matrices as (inputs, outputs), in the order of forward: query, key, value, output, then the MLP."""
        width, query, key = self.width, self.heads * self.head_width, self.kv_heads * self.head_width
        attention = [(width, query), (width, key), (width, key), (query, width)] if self.heads else []
        return [*attention, *[(width, self.inner)] * (self.mlp_matrices - 1), (self.inner, width)]

    @property
    def block(self) -> int:
        """Parameters of a block: matrices of attention and MLP, biases, norms. The average, if counted."""
        if self.in_blocks:
            return round(self.in_blocks / self.blocks)
        biases = sum(outputs for _, outputs in self.matrices) if self.biases else 0
        return weights_of(self.matrices) + biases + self.norms

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
        ends = self.embedding + self.last_norm + self.head * (not self.tied)
        return (self.in_blocks or self.blocks * self.block) + ends + self.beside

    @property
    def active_parameters(self) -> int:
        """Parameters of the text model that a token passes: without the experts that are not for it."""
        return self.parameters - self.beside - self.idle


def from_config(config: "PretrainedConfig | str | Path", name: str = "") -> ModelShape:
    """The shape that a transformers config describes: an object, or the path of a config.json or its folder.

    Parameters are counted on the meta device; activations are taken for a Llama's, but for GPT-2. Raises ValueError.
    """
    import transformers  # a second and more, which forecasts for known models do without

    try:
        if isinstance(config, str | Path):
            config = transformers.AutoConfig.from_pretrained(config, local_files_only=True)
        found = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = found._from_config(config) if found else transformers.AutoModelForCausalLM.from_config(config)
        text = config.get_text_config()
        blocks, width, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
    except Exception as error:  # whatever their classes say of sizes that are missing or don't fit
        raise ValueError(f"this config does not give a transformer: {error}") from error

    def size(*names: str) -> Any:
        return next((value for each in names if (value := getattr(text, each, None))), None)

    head_width = size("head_dim") or width // heads
    if value := size("v_head_dim"):  # in DeepSeek's attention queries and values differ: the average
        head_width = (text.qk_nope_head_dim + text.qk_rope_head_dim + value) // 2
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == blocks]
    layers = max(lists, key=_parameters)  # a vision tower may have as many
    of_experts = sum(each.numel() for path, each in layers.named_parameters() if ".experts." in path)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    inner, kv_heads = size("intermediate_size", "n_inner") or 4 * width, size("num_key_value_heads") or heads
    sizes = blocks, width, inner, heads, kv_heads, head_width, text.vocab_size
    shape = ModelShape(
        name or config.model_type,
        *sizes,
        tied=head is None or head.weight is embedding.weight,
        in_blocks=_parameters(layers),
        idle=of_experts and of_experts - of_experts * text.num_experts_per_tok // size(*_EXPERTS),
        **({"positions": text.n_positions} | GPT_2 if text.model_type == "gpt2" else {}),
    )
    return replace(shape, beside=_parameters(model) - shape.parameters)


def weights_of(matrices: Sequence[tuple[int, int]]) -> int:
    """How many numbers such matrices hold."""
    return sum(inputs * outputs for inputs, outputs in matrices)


def _parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def forward_flops_of_block(shape: ModelShape, sequence: int) -> float:
    """Operations of a block's forward for a token: two for each weight, and the attention's over a whole `sequence`."""
    weights = shape.block - shape.norms - shape.idle // shape.blocks
    return 2 * weights + 4 * sequence * shape.heads * shape.head_width


def flops_per_token(shape: ModelShape, sequence: int, recomputes: bool = False) -> float:
    """Operations of forward and backward for a token: about 6 N, and 12 · blocks · width · sequence.

    Of a mixture only the active experts count. `recomputes`: checkpointing does each block's forward twice.
    """
    blocks = shape.blocks * forward_flops_of_block(shape, sequence)
    return (4 if recomputes else 3) * blocks + 6 * shape.head


def bytes_per_token(shape: ModelShape, element: int = 2, checkpointing: bool | str = False, tp: int = 1) -> float:
    """Bytes that a block saves for each token, on each of `tp` ranks that share it (sequence parallelism included).

    `element`: bytes of a number. `checkpointing`: as of a `Layout`. Raises ValueError for a mixture of experts.
    """
    refuse_mixture(shape)
    width, inner = shape.width, shape.inner
    if checkpointing is True:
        return element * width / tp
    attention = shape.heads * (element * shape.head_width + _FLOAT32)  # the output, and a sum of exponentials
    if checkpointing:
        kept = {"selective": shape.matrices[:-1], "half": shape.matrices[::2]}[checkpointing]
        return (element * (width + sum(outputs for _, outputs in kept)) + attention) / tp
    attention += element * (shape.heads + 2 * shape.kv_heads) * shape.head_width  # q, k and v
    # x in float32 and scaled, its scale, and what is put out; or x as it is
    rms = _FLOAT32 + 2 * element * width + (0 if shape.fused_norms else _FLOAT32 * width)
    layer = 2 * element * width + 2 * element  # input and output, mean and deviation
    norms = (element * width, 2 * rms, 2 * layer)[shape.norm_vectors]  # without norms, the MLP's input
    return (norms + attention + element * shape.saved_in_mlp * inner) / tp


def refuse_mixture(shape: ModelShape) -> None:
    """Raise ValueError for a mixture of experts."""
    if shape.idle:
        raise ValueError(f"{shape.name} is a mixture of experts: only its parameters and operations are forecast here")
