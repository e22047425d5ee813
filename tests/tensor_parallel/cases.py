"""What the tests share: plain models, their inputs, and a comparison with one process."""

import torch
import torch._dynamo  # as transformers: imported here once, and not in every forked rank
from torch import nn
from torch.nn.functional import silu
from transformers import LlamaForCausalLM  # noqa: F401

from scratch_ddp.benchmark.steps import build_llama
from scratch_ddp.tensor_parallel import gather_full_grads, gather_full_params

VOCABULARY, TOKENS = 32, 8
SMALL_LLAMA = {
    "dtype": torch.float64,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


class Block(nn.Module):
    """An MLP between two norms, with biases everywhere."""

    def __init__(self, width: int = 8, hidden: int = 24):
        super().__init__()
        self.first, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(silu(self.up(self.first(x))))


def seeded(build, *args, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return build(*args, **kwargs).double()


def llama(**sizes) -> nn.Module:
    return build_llama(**(SMALL_LLAMA | sizes))


def random_input(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(rows: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def assert_close(mine: torch.Tensor, plain: torch.Tensor, told: str = "") -> None:
    torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12, msg=lambda text: f"{told}: {text}")


def assert_same_model(mine: nn.Module, plain: nn.Module, atol: float = 1e-12) -> None:
    """Parameters and gradients are those of the plain model, under the same names, on every rank."""
    parameters, gradients = gather_full_params(mine), gather_full_grads(mine)
    expected = dict(plain.named_parameters(remove_duplicate=False))
    assert sorted(parameters) == sorted(expected)
    for name, parameter in expected.items():
        torch.testing.assert_close(parameters[name], parameter.data, rtol=0, atol=atol)
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=atol)
