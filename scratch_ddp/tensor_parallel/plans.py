"""Plans for `parallelize`, and the entries in them that are no layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad

from scratch_ddp.tensor_parallel import moves
from scratch_ddp.tensor_parallel.cross_entropy import vocabulary_parallel_cross_entropy
from scratch_ddp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding

Group = dist.ProcessGroup | None
Install = Callable[[], object]


class move_input:
    """Move the module's input once, for all layers in it that read it; their `input_move` is None.

    With an f in each of q, k and v, backward would take three all-reduces where one does. The input is the first
    positional argument, or the keyword argument `hidden_states`. With None for `move` it stays as it is.
    The ranks see a part of the module's tokens or heads. So the gradients of parameters that the plan leaves whole in
    it are parts of a sum, which each backward adds up. After an f the plan must slice all that is inside.
    """

    def __init__(self, module: nn.Module, group: Group, move: str | None = "copy", head_size: int | None = None):
        self.module, self.group, self.move, self.head_size = module, group, move, head_size
        self.summed: list[nn.Parameter] = []

    def leave_whole(self, path: str, named: Mapping[str, nn.Parameter]) -> None:
        """Take the parameters that the plan leaves whole. Raises ValueError for those that can't be."""
        if self.move in ("copy", "gather"):
            for name, parameter in named.items():
                if name.count(".") != 1 or tuple(parameter.shape) != (self.head_size,):  # one module for each head
                    here = f"{path or 'the model'}: {name!r}"
                    raise ValueError(f"{here} would be whole among slices: this plan is not for this model")
        if self.move != "reduce_scatter":
            self.summed = list(named.values())

    def __call__(self) -> None:
        """Change the module."""
        if self.move:
            hook = partial(_move_input, name=self.move, group=self.group)
            self.module.register_forward_pre_hook(hook, with_kwargs=True)
        for parameter in self.summed:
            if not hasattr(parameter, "summed_over"):  # by another entry
                parameter.summed_over, trained = self.group, parameter.requires_grad
                parameter.requires_grad_().register_hook(partial(moves.all_reduce, group=self.group))
                parameter.requires_grad_(trained)  # one that is frozen may be trained later


def _move_input(_: nn.Module, args: tuple, kwargs: dict[str, Any], name: str, group: Group) -> tuple[tuple, dict]:
    if args:
        return (moves.move(args[0], name, group), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": moves.move(kwargs["hidden_states"], name, group)}


def attention_by_heads(attention: nn.Module, group: Group, move: str = "copy") -> Install:
    """`move_input` for an attention with `q_proj`, `k_proj`, `v_proj` and `head_dim`: each rank gets whole heads.

    A rank's key/value heads are those that its own query heads use, since both are sliced in order. A norm of each
    head stays whole, and its gradient is summed. Raises ValueError if n ranks can't hold equally many heads.
    """
    if hasattr(attention, "num_heads"):
        raise ValueError("it cuts by its own num_heads, which a rank does not have: this plan is not for this model")
    for name, what in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
        heads, n = getattr(attention, name).out_features // attention.head_dim, dist.get_world_size(group)
        if heads % n:
            evenly = f"can't be shared evenly by {n} ranks: take a number of ranks that divides {heads}"
            raise ValueError(f"the {heads} {what} heads {evenly}")
    return move_input(attention, group, move, attention.head_dim)


# For a module that computes on slices of tokens, such as a norm: gradients of whole parameters are summed. Costs one
# all-reduce for each of them in each backward, of the parameter's size.
on_token_slices = partial(move_input, move=None)


def vocabulary_parallel_loss(model: nn.Module, group: Group) -> Install:
    """For a causal language model of transformers whose logits are sliced: `model(input_ids, labels=…).loss`.

    `generate()` needs whole logits, from a head with `gather_output`, and to sample the same seed on every rank.
    """
    if not hasattr(type(model), "loss_function"):
        raise ValueError(f"{type(model).__name__} has no loss_function: leave the plan's entry '' out")
    return partial(setattr, model, "loss_function", partial(_next_token_loss, group=group))


def _next_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int = 0,
    *_: Any,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    group: Group = None,
    **__: Any,
) -> torch.Tensor:
    """What transformers' ForCausalLMLoss computes: logits at one place predict the label at the next."""
    targets = pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    if logits.shape[-1] == vocab_size:  # they are whole
        logits = moves.move(logits, "split", group, dim=-1)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = vocabulary_parallel_cross_entropy(logits, targets, group, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_columns = partial(ColumnParallelLinear, input_move=None)
_PROJECTIONS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), _columns),
    **dict.fromkeys(("o_proj", "down_proj"), RowParallelLinear),
}
LLAMA = {
    "": vocabulary_parallel_loss,
    "embed_tokens": VocabularyParallelEmbedding,
    "self_attn": attention_by_heads,
    "mlp": move_input,
    **_PROJECTIONS,
    "lm_head": ColumnParallelLinear,
}
LLAMA_SEQUENCE = {  # residual stream and norms hold slices of tokens
    **LLAMA,
    # The model reads the positions from the embedding's shape, so its output is sliced where the first block begins.
    # Until then it is a part of a sum: the model takes `input_ids`, since `inputs_embeds` would be added up.
    "embed_tokens": partial(VocabularyParallelEmbedding, output_move=None),
    "layers.0": partial(move_input, move="reduce_scatter"),
    "self_attn": partial(attention_by_heads, move="gather"),
    "mlp": partial(move_input, move="gather"),
    **dict.fromkeys(("o_proj", "down_proj"), partial(RowParallelLinear, output_move="reduce_scatter")),
    **dict.fromkeys(("layers", "norm"), on_token_slices),
    "lm_head": partial(ColumnParallelLinear, input_move="gather"),
}
