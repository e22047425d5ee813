"""Models by name, and what was published about training them: for forecasts that can be compared with something."""

from dataclasses import dataclass

from scratch_ddp.instruments.cost.layouts.layout import Layout
from scratch_ddp.instruments.cost.transformer.shape import ModelShape, from_config

_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "model_type": "llama"}


def _llama(name: str, blocks: int, width: int, inner: int, heads: int, **more: object) -> ModelShape:
    sizes = {"num_hidden_layers": blocks, "hidden_size": width, "intermediate_size": inner}
    return from_config({**_LLAMA_3, **sizes, "num_attention_heads": heads, **more}, name)


def _gpt(name: str, blocks: int, width: int, heads: int, vocabulary: int = 51200, positions: int = 2048) -> ModelShape:
    sizes = {"n_layer": blocks, "n_embd": width, "n_head": heads, "n_positions": positions, "vocab_size": vocabulary}
    return from_config({"model_type": "gpt2", **sizes}, name)


XXL = ModelShape(  # of the course's write-up on accounting: two matrices and a relu in a block, and nothing else
    "XXL", blocks=126, width=16_384, inner=53_248, mlp_matrices=2, norm_vectors=0, saved_in_mlp=1
)
DEEPSEEK_V3 = from_config(
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "DeepSeek-V3",
)

_SHAPES = [
    XXL,
    DEEPSEEK_V3,
    _gpt("GPT-2", 12, 768, 12, 50257, 1024),
    _gpt("GPT-2 XL", 48, 1600, 25, 50257, 1024),
    _llama("SmolLM2-360M", 32, 960, 2560, 15, vocab_size=49152, num_key_value_heads=5, tie_word_embeddings=True),
    _llama("Llama-2-13B", 40, 5120, 13824, 40, vocab_size=32000, num_key_value_heads=40),
    _llama("Llama-3-8B", 32, 4096, 14336, 32),
    _llama("Llama-3-70B", 80, 8192, 28672, 64),
    _llama("Llama-3-405B", 126, 16384, 53248, 128),
    _llama("Mixtral-8x7B", 32, 4096, 14336, 32, vocab_size=32000, num_local_experts=8, model_type="mixtral"),
]
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}


def model(name: str) -> ModelShape:
    """Return the shape of that name, in capitals or not. Raises ValueError, listing all names, if there is none."""
    for known, shape in MODELS.items():
        if known.lower() == name.lower():
            return shape
    raise ValueError(f"there is no model {name!r}, and no such file; there are {', '.join(MODELS)}")


@dataclass(frozen=True)
class PublishedRun:
    """A training run as its authors describe it: its layout, and the TFLOP/s of each GPU.

    batch: sequences of `sequence` tokens in a step · recomputes: whether all activations are computed twice.
    """

    shape: ModelShape
    cluster: str
    tp: int
    pp: int
    dp: int
    batch: int
    sequence: int
    tflops: float
    recomputes: bool

    def layout(self, chunks: int = 1) -> Layout:
        """Its layout, with micro-batches of one sequence, and so many chunks of the pipeline on each rank."""
        stage = "DDP" if self.recomputes else "ZeRO-2"
        return Layout(self.dp, self.tp, self.pp, 1, self.batch // self.dp, stage, self.recomputes, chunks)


_NARAYANAN = """D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
SC 2021, table 1. All activations are recomputed; its TFLOP/s count that."""
_LLAMA_PAPER = 'Llama team, "The Llama 3 Herd of Models", 2024, table 4. Activations are kept.'

_TABLE = (  # parameters in 10⁹, heads, width, blocks, tp, pp, GPUs, batch, TFLOP/s of a GPU
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
MEGATRON = tuple(
    PublishedRun(
        _gpt(f"GPT {size:g}B", blocks, width, heads), "A100 HDR", tp, pp, gpus // tp // pp, batch, 2048, tflops, True
    )
    for size, heads, width, blocks, tp, pp, gpus, batch, tflops in _TABLE
)
LLAMA_3 = tuple(
    PublishedRun(MODELS["Llama-3-405B"], "H100", 8, 16, dp, batch, 8192, tflops, False)
    for dp, batch, tflops in ((64, 64 * 32, 430), (128, 128 * 16, 400))
)
