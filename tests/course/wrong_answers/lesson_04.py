"""Wrong answers to the exercises of lesson 04."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "same_on_all_ranks": (
        WrongAnswer(
            "the sum of all bytes: blind for order",
            "value",
            "the last rank has two weights in another order: the result is True, should be False",
            body="""
            tensors = [*model.parameters(), *model.buffers()]
            mine = sum(tensor.detach().contiguous().flatten().view(torch.uint8).long().sum() for tensor in tensors)
            everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, mine)
            return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "Python's hash, which is the same for -1 and -2",
            "value",
            "the result is",
            body="""
            numbers = [each.detach().flatten().tolist() for each in [*model.parameters(), *model.buffers()]]
            mine = torch.tensor([hash(tuple(map(tuple, numbers)))])
            everyones = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyones, mine)
            return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "forgets the buffers",
            "value",
            "the last rank has another buffer: the result is True, should be False",
            {"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        ),
        WrongAnswer(
            "each rank compares with rank 0 alone, so rank 0 never finds anything",
            "value",
            "the last rank has another weight: the result is True, should be False",
            {"for other in everyones)": "for other in everyones[:1])"},
        ),
        WrongAnswer(
            "numpy knows no bfloat16",
            "runs",
            "equal models: Rank 0 raised TypeError: Got unsupported ScalarType BFloat16",
            {".view(torch.uint8)": ""},
        ),
        WrongAnswer(
            "sends the whole model",
            "cost",
            "bytes from one rank, budget",
            body="""
            tensors = [*model.parameters(), *model.buffers()]
            everything = torch.cat([each.detach().flatten().double() for each in tensors])
            everyones = [torch.empty_like(everything) for _ in range(world_size)]
            dist.all_gather(everyones, everything)
            return all(torch.equal(everything.nan_to_num(-7), each.nan_to_num(-7)) for each in everyones)
            """,
        ),
    ),
}
