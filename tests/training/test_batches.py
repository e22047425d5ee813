"""Who works on which pairs, and what a batch is made of."""

from hypothesis import given, settings
from hypothesis import strategies as st

from scratch_ddp.training.data import Batches, Item, sentences, tokenise
from scratch_ddp.training.models import build_tokenizer
from scratch_ddp.training.pairs import make_pairs

KINDS = ("interleaved", "contiguous")


def numbered(count: int) -> list[Item]:
    return [Item([i + 1], i % 2) for i in range(count)]


def own_rows(batch) -> list[int]:
    return batch.inputs["input_ids"][: batch.count, 0].tolist()


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.sampled_from(KINDS))
def test_batches_lose_nothing_and_keep_ranks_in_step(items, share, world_size, shuffled, kind):
    if items < world_size:
        return
    size, seed = share * world_size, 3 if shuffled else None
    ranks = [
        list(Batches(numbered(items), size, 0, rank, world_size, kind, seed).epoch(1)) for rank in range(world_size)
    ]
    alone = list(Batches(numbered(items), size, 0, seed=seed).epoch(1))
    assert all(len(batches) == len(alone) == -(-items // size) for batches in ranks)
    for step, together in enumerate(zip(*ranks, strict=True)):
        rows = sum((own_rows(batch) for batch in together), [])
        assert all(batch.global_count == len(rows) and len(batch.labels) >= 1 for batch in together)
        if kind == "interleaved":  # the same global batch as in one process
            assert sorted(rows) == sorted(own_rows(alone[step]))
    everything = [row for batches in ranks for batch in batches for row in own_rows(batch)]
    assert sorted(everything) == list(range(1, items + 1))


def test_each_epoch_has_its_own_order_and_may_begin_later():
    batches = Batches(numbered(16), 4, 0, seed=0)
    orders = [[own_rows(batch) for batch in batches.epoch(number)] for number in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    assert [own_rows(batch) for batch in batches.epoch(1, first=3)] == orders[1][3:]
    assert own_rows(next(Batches(numbered(4), 4, 0).epoch(7))) == [1, 2, 3, 4]


def test_tokenise_separates_and_cuts_the_longer_sentence():
    rows = make_pairs({"train": 12})["train"]
    tokenizer = build_tokenizer(sentences(rows))
    whole, end = tokenise(rows, tokenizer), tokenizer.sep_token_id
    assert [item.label for item in whole] == rows["label"]
    assert all(item.tokens.count(end) == 2 and item.tokens[-1] == end for item in whole)
    assert tokenizer.decode(whole[0].tokens[: whole[0].tokens.index(end)]).strip() == rows["sentence1"][0]
    short = len(tokenizer("Oslo")["input_ids"])
    long = {"sentence1": ["Oslo " * 9], "sentence2": ["Oslo"], "label": [1]}
    cut = tokenise(long, tokenizer, max_length=short + 6)[0].tokens
    assert len(cut) == short + 6 and cut[4] == cut[-1] == end, "the short one keeps its words"


def test_a_batch_is_padded_on_the_right():
    (batch,) = Batches([Item([5, 6, 7], 1), Item([8], 0)], 2, pad=9).epoch()
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.labels.tolist() == [1, 0]
