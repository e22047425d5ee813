"""Tensor parallelism: each rank holds a slice of every large matrix, and all ranks work on the same tokens together.

`parallelize` changes a model in place, layer by layer, as a plan says; `LLAMA` and `LLAMA_SEQUENCE` are plans for
transformers' Llama and models built like it. The layers can be used alone too.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"))
    model = BucketedDDP(parallelize(model, LLAMA, mesh["tp"]), group=mesh["dp"])
    loss = model(input_ids=ids, labels=ids).loss  # all ranks of a tp group pass the same ids
"""

from scratch_ddp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from scratch_ddp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
from scratch_ddp.tensor_parallel.moves import move
from scratch_ddp.tensor_parallel.parallelize import parallelize
from scratch_ddp.tensor_parallel.plans import (
    LLAMA,
    LLAMA_SEQUENCE,
    attention_by_heads,
    move_input,
    on_token_slices,
    vocabulary_parallel_loss,
)
from scratch_ddp.tensor_parallel.sliced import clip_grad_norm_, gather_full_grads, gather_full_params

__all__ = ["LLAMA", "LLAMA_SEQUENCE", "ColumnParallelLinear", "RowParallelLinear", "VocabularyParallelEmbedding"]
__all__ += ["attention_by_heads", "clip_grad_norm_", "gather_full_grads", "gather_full_params", "move", "move_input"]
__all__ += ["on_token_slices", "parallelize", "vocabulary_parallel_cross_entropy", "vocabulary_parallel_loss"]
