"""Training on sentence pairs: data, models, and the loop with its evaluation, which all strategies share.

`python -m scratch_ddp.training` (also under torchrun) puts them together:

    pairs = load_pairs()
    model, tokenizer = load_model(texts=sentences(pairs["train"]))
    batches = Batches(tokenise(pairs["train"], tokenizer), 16, tokenizer.pad_token_id)
    train(model, batches)
"""

from scratch_ddp.training.data import Batches, load_pairs, sentences, shard, tokenise
from scratch_ddp.training.loop import evaluate, score, train
from scratch_ddp.training.models import SMOLLM2_360M, build_small, load_model

__all__ = ["SMOLLM2_360M", "Batches", "build_small", "evaluate", "load_model", "load_pairs"]
__all__ += ["score", "sentences", "shard", "tokenise", "train"]
