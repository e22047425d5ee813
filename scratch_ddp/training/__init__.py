"""Training on sentence pairs: data, models, the loop that all strategies share, evaluation.

`python -m scratch_ddp.training` (also under torchrun) puts them together:

    pairs = load_pairs()
    model, tokenizer = load_model(texts=sentences(pairs["train"]))
    batches = Batches(tokenise(pairs["train"], tokenizer), 16, tokenizer.pad_token_id)
    train(model, batches)
"""

from scratch_ddp.training.data import Batches, load_pairs, sentences, shard, tokenise
from scratch_ddp.training.evaluation import evaluate, score
from scratch_ddp.training.loop import seed_everything, train
from scratch_ddp.training.models import SMOLLM2_360M, build_small, load_model

__all__ = ["SMOLLM2_360M", "Batches", "build_small", "evaluate", "load_model", "load_pairs"]
__all__ += ["score", "seed_everything", "sentences", "shard", "tokenise", "train"]
