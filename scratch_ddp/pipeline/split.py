"""A model as a list of layers, and where to cut the list so that the slowest stage is as quick as it can be."""

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

DECODERS = ("llama", "qwen2", "qwen3")  # transformers' model types that are cut


class Layer(NamedTuple):
    """Something that is not cut. `call` takes a tensor and returns one; `modules` it consists of, by their names."""

    call: Callable[[torch.Tensor], torch.Tensor]
    modules: dict[str, nn.Module]

    def numel(self) -> int:
        """How many numbers its parameters hold."""
        return sum(each.numel() for module in self.modules.values() for each in module.parameters())


def layers_of(model: nn.Module | Sequence[nn.Module]) -> list[Layer]:
    """Return the layers of a `Sequential`, a list of modules or a transformers decoder with its head, in order.

    A decoder's layer 0 is its embedding, layer 1 + i is block i, the last one is the norm with the head. It takes token
    ids, without padding, and puts out logits. Raises TypeError or ValueError for what can't be cut.
    """
    if isinstance(model, list | tuple):
        model = nn.Sequential(*model)
    chains = nn.Sequential, nn.ModuleList
    if isinstance(model, chains) and type(model).forward in [each.forward for each in chains]:  # not one of its own
        return [Layer(module, {name: module}) for name, module in model._modules.items()]  # one may come several times
    kind = getattr(getattr(model, "config", None), "model_type", None)
    its = next((each for each in type(model).__mro__ if "forward" in vars(each)), object)  # whose forward it has
    if kind in DECODERS and hasattr(model, "lm_head") and its.__module__.startswith("transformers."):
        return _decoder_layers(model)
    can = f"an nn.Sequential, a list of modules, or a transformers model with a head, of type {', '.join(DECODERS)}"
    raise TypeError(f"a {type(model).__name__} can't be cut, only {can}")


def _decoder_layers(model: nn.Module) -> list[Layer]:
    attention, kinds = model.config._attn_implementation, getattr(model.config, "layer_types", None) or ()
    if attention != "sdpa" or any(kind != "full_attention" for kind in kinds):
        raise ValueError("a decoder is cut only if its blocks need no mask: load it with attn_implementation='sdpa'")
    inner = model.model
    rotary = {"model.rotary_emb": inner.rotary_emb}
    blocks = [
        Layer(partial(_call_block, block, inner.rotary_emb), {f"model.layers.{number}": block, **rotary})
        for number, block in enumerate(inner.layers)
    ]
    head = Layer(lambda x: model.lm_head(inner.norm(x)), {"model.norm": inner.norm, "lm_head": model.lm_head})
    return [Layer(inner.embed_tokens, {"model.embed_tokens": inner.embed_tokens}), *blocks, head]


def _call_block(block: nn.Module, rotary: nn.Module, x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    out = block(x, attention_mask=None, position_ids=places, position_embeddings=rotary(x, places))
    return out[0] if isinstance(out, tuple) else out


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """Return the numbers of the layers before which to cut, so that the costliest of the stages costs the least.

    costs: of each layer. Raises ValueError if there are fewer layers than stages.
    """
    if len(costs) < stages:
        raise ValueError(f"{len(costs)} layers can't be cut into {stages} stages: use fewer ranks or fewer stages")
    upto = [0, *itertools.accumulate(costs)]

    @functools.cache
    def best(end: int, stages: int) -> tuple[float, tuple[int, ...]]:
        """The costliest stage, and the cuts, where the first `end` layers are cut best."""
        if stages == 1:
            return upto[end], ()
        before = {cut: best(cut, stages - 1) for cut in range(stages - 1, end)}
        return min((max(cost, upto[end] - upto[cut]), (*cuts, cut)) for cut, (cost, cuts) in before.items())

    return list(best(len(costs), stages)[1])
