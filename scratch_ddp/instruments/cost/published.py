"""Models by name, and what was published about training them: for forecasts that can be compared with something."""

from dataclasses import dataclass, replace

from scratch_ddp.instruments.cost.layouts import EFFICIENCY, Layout, step_time
from scratch_ddp.instruments.cost.models import GPT_2, ModelShape, flops_per_token
from scratch_ddp.instruments.cost.states import MIXED, WIDE_GRADIENTS, Precision
from scratch_ddp.instruments.cost.wire import CLUSTERS, Cluster


def _gpt(name: str, blocks: int, width: int, heads: int, vocabulary: int = 51200, positions: int = 2048) -> ModelShape:
    sizes = 4 * width, heads, heads, width // heads, vocabulary
    return ModelShape(name, blocks, width, *sizes, tied=True, positions=positions, **GPT_2)


_SHAPES = [
    # Of the course's write-up on accounting: two matrices and a relu in a block, and nothing else.
    ModelShape("XXL", 126, 16_384, 53_248, mlp_matrices=2, norm_vectors=0, saved_in_mlp=1),
    _gpt("GPT-2", 12, 768, 12, 50257, 1024),
    _gpt("GPT-2 XL", 48, 1600, 25, 50257, 1024),
    ModelShape("SmolLM2-360M", 32, 960, 2560, 15, 5, 64, 49152, tied=True),
    ModelShape("Llama-2-13B", 40, 5120, 13824, 40, 40, 128, 32000),
    ModelShape("Llama-3-8B", 32, 4096, 14336, 32, 8, 128, 128256),
    ModelShape("Llama-3-70B", 80, 8192, 28672, 64, 8, 128, 128256),
    ModelShape("Llama-3-405B", 126, 16384, 53248, 128, 8, 128, 128256),
    # Mixtures of experts, as `from_config` counts them.
    ModelShape("Mixtral-8x7B", 32, 4096, 14336, 32, 8, 128, 32000, in_blocks=46_440_644_608, idle=33_822_867_456),
    ModelShape("DeepSeek-V3", 61, 7168, 18432, 128, 128, 160, 129280, in_blocks=669_173_039_104, idle=633_474_121_728),
]
MODELS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
_A100, _H100 = CLUSTERS["A100 HDR"], CLUSTERS["H100"]


@dataclass(frozen=True)
class PublishedRun:
    """A run as its authors describe it: its layout, and the TFLOP/s of a GPU, with what is computed twice."""

    shape: ModelShape
    cluster: Cluster
    layout: Layout
    sequence: int
    tflops: float
    precision: Precision = MIXED
    held: float = 0.0  # bytes of a GPU, if they are published

    def forecast(self, efficiency: float = EFFICIENCY) -> float:
        """The TFLOP/s by `step_time`."""
        took = step_time(self.shape, self.layout, self.cluster, self.sequence, efficiency, self.precision).total
        flops = flops_per_token(self.shape, self.sequence, self.layout.checkpointing is True)
        return flops * self.layout.batch * self.sequence / took / self.layout.devices / 1e12


# D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, table
# 1, interleaved where there is a pipeline (section 5.1), here in the fewest chunks that divide a stage; table 2 for
# GPT-3, under ZeRO-3 too.
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


def _megatron(size: float, heads: int, width: int, blocks: int, tp: int, pp: int, gpus: int, batch: int, tflops: float):
    dp = gpus // tp // pp
    fewest = next(chunks for chunks in range(2, blocks + 1) if blocks // pp % chunks == 0)
    chunks = fewest if pp > 1 and batch // dp % pp == 0 else 1
    layout = Layout(dp, tp, pp, 1, batch // dp, checkpointing=True, chunks=chunks)
    return PublishedRun(_gpt(f"GPT {size:g}B", blocks, width, heads), _A100, layout, 2048, tflops)


MEGATRON = tuple(_megatron(*row) for row in _TABLE)
GPT_3 = tuple(
    _megatron(174.6, 96, 12288, 96, 8, 12, gpus, 1536, tflops) for gpus, tflops in ((384, 153), (768, 149), (1536, 141))
)
GPT_3_SHARDED = tuple(
    PublishedRun(GPT_3[0].shape, _A100, Layout(n, micro=1536 // n, stage="ZeRO-3", checkpointing=True), 2048, tflops)
    for n, tflops in ((384, 144), (768, 88), (1536, 44))
)
# Llama team, "The Llama 3 Herd of Models", 2024, table 4: no activations are computed twice, gradients are float32, and
# the pipeline has a block a chunk, if embedding and head count as one each. Which kernels it had is not said: here they
# are those of Meta's xformers, whose SwiGLU saves two tensors, and norms that are fused, too.
_405B = replace(MODELS["Llama-3-405B"], saved_in_mlp=2, fused_norms=True)
LLAMA_3 = tuple(
    PublishedRun(_405B, _H100, Layout(dp, 8, 16, 1, m, "ZeRO-1", chunks=8), 8192, tflops, WIDE_GRADIENTS)
    for dp, m, tflops in ((64, 32, 430), (128, 16, 400))
)
# pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: FSDP on H100 of 96 GB and 500 instead
# of 700 W, without and with torch.compile. The "op" checkpointing of llama3_8b.toml does every second matrix again.
_8B = MODELS["Llama-3-8B"]
_FLOPS = flops_per_token(_8B, 8192) / 1e12
_MEASURED = ((8, 5762, 82.4), (8, 6667, 77.0), (128, 5605, 67.0), (128, 6514, 62.0))  # GPUs, tokens/s of one, its GiB
TORCHTITAN = tuple(
    PublishedRun(
        _8B, _H100, Layout(n, 1, 1, 2, 1, "ZeRO-3", "half"), 8192, _FLOPS * tokens, WIDE_GRADIENTS, 2**30 * gib
    )
    for n, tokens, gib in _MEASURED
)
