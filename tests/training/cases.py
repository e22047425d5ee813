"""What tests of training and of evaluation share: the built-in pairs, and a model that takes milliseconds a step."""

# Optimizers and models import these at first use: once here, not in every forked rank.
import torch._dynamo  # noqa: F401
from transformers import LlamaForSequenceClassification  # noqa: F401

from scratch_ddp.training.pairs import make_pairs

PAIRS = make_pairs()
TINY = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3, "num_key_value_heads": 1}
