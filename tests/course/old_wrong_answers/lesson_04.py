"""Wrong answers to the exercises of lesson 04."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "same_on_all_ranks": (
        WrongAnswer(
            "Python's hash of numbers",
            fails="value",
            says="rank 1 differs in an int8: -2, -1 elsewhere: rank 0's result is True, should be False",
            body="""
            hashes = []
            for tensor in [*model.parameters(), *model.buffers()]:
                hashes.append(hash(tuple(tensor.detach().contiguous().flatten().view(torch.int8).tolist())))
            mine = torch.tensor([hash(tuple(hashes))])
            everyones = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyones, mine)
            return len({theirs.item() for theirs in everyones}) == 1
            """,
        ),
        WrongAnswer(
            "what numpy does not know becomes float32",
            fails="value",
            says="rank 1 differs in the imaginary part of a complex32: rank 0's result is True, should be False",
            body="""
            digest = hashlib.sha256()
            for tensor in [*model.parameters(), *model.buffers()]:
                try:
                    known = tensor.detach().contiguous().numpy()
                except TypeError:
                    known = tensor.detach().float().contiguous().numpy()
                digest.update(known.tobytes())
            mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
            everyones = [torch.empty_like(mine) for _ in range(world_size)]
            dist.all_gather(everyones, mine)
            return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "shares the 32 bytes out among the tensors",
            fails="value",
            says="one rank differs in a bit or in the order: rank 0's result is True, should be False",
            body="""
tensors = [*model.parameters(), *model.buffers()]
room, shared = 32 // len(tensors), b""
for tensor in tensors:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    shared += hashlib.sha256(content).digest()[:room]
mine = torch.tensor(list(shared.ljust(32, b"0")), dtype=torch.uint8, device=tensor.device)
everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
dist.all_gather(everyones, mine)
return all(torch.equal(mine, other) for other in everyones)
""",
        ),
        WrongAnswer(
            "the sum of all numbers for a digest",
            fails="value",
            says="Rank 0, equal models, with NaN and inf: the result is False, should be True.",
            body="""
                mine = sum(tensor.detach().double().sum() for tensor in [*model.parameters(), *model.buffers()])
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "the sum of all bytes: blind for order",
            fails="value",
            also=("digest",),
            says="in the order of the same numbers: rank 0's result is True, should be False.",
            body="""
                tensors = [*model.parameters(), *model.buffers()]
                mine = sum(tensor.detach().contiguous().flatten().view(torch.uint8).long().sum() for tensor in tensors)
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "each rank compares with rank 0 alone, so rank 0 never finds anything",
            fails="value",
            says="Rank 0, the last rank differs in the last bit of a float64: the result is True, should be False.",
            edits={"for other in everyones)": "for other in everyones[:1])"},
            also=("agreement",),
        ),
        WrongAnswer(
            "rounds first, as allclose would",
            fails="value",
            says="the last rank differs in the last bit of a float64: the result is True, should be False.",
            edits={"tensor.detach()": "tensor.detach().float().round(decimals=5)"},
        ),
        WrongAnswer(
            "takes -0.0 for 0.0, as == does",
            fails="value",
            says=": rank 0's result is True, should be False.",
            edits={"tensor.detach()": "(tensor.detach() + 0.0 if tensor.itemsize > 1 else tensor.detach())"},
        ),
        WrongAnswer(
            "forgets the buffers",
            fails="value",
            says=": rank 0's result is True, should be False.",
            edits={"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        ),
        WrongAnswer(
            "numpy knows no bfloat16",
            fails="runs",
            says="raised TypeError: Got unsupported ScalarType BFloat16",
            edits={".view(torch.uint8)": ""},
        ),
        WrongAnswer(
            "sends the digest as an object",
            fails="cost",
            says="calls all_gather twice, budget 1",
            body="""
                digest = hashlib.sha256()
                for tensor in [*model.parameters(), *model.buffers()]:
                    digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
                everyones = [None] * dist.get_world_size()
                dist.all_gather_object(everyones, digest.hexdigest())
                return len(set(everyones)) == 1
            """,
        ),
        WrongAnswer(
            "freezes the model",
            fails="untouched",
            says="requires_grad is False, should be True",
            edits={"    digest = hashlib.sha256()": "    model.requires_grad_(False)\n    digest = hashlib.sha256()"},
        ),
        WrongAnswer(
            "looks into state_dict(), which leaves a buffer out",
            fails="value",
            says=": rank 0's result is True, should be False.",
            edits={"[*model.parameters(), *model.buffers()]": "model.state_dict().values()"},
        ),
        WrongAnswer(
            "sends one byte of the digest",
            fails="digest",
            says="has 1 bytes, should have 8 to 32",
            edits={"list(digest.digest())": "list(digest.digest())[:1]"},
        ),
        WrongAnswer(
            "sums of bytes, weighted by their place and its square",
            fails="value",
            also=("digest",),
            says="the same CRC-32 and the same sums, also weighted by place: rank 0's result is True, should be False.",
            body="""
                tensors = [*model.parameters(), *model.buffers()]
                parts = [tensor.detach().contiguous().flatten().view(torch.uint8).long() for tensor in tensors]
                flat = torch.cat(parts)
                place = torch.arange(len(flat)) + 1
                mine = torch.stack([(flat * place**power).sum() for power in range(3)])
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "the beginning and the end of long tensors",
            fails="value",
            says="of 300,000: -0.0, 0.0 elsewhere: rank 0's result is True, should be False.",
            edits={
                "digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())": "content = "
                "tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()\n"
                "        digest.update(content[:400_000] + content[-400_000:])",
            },
        ),
        WrongAnswer(
            "asks torch whether a parameter has changed since its last digest",
            fails="value",
            says="the last rank differs in the last bit of a float64: the result is True, should be False.",
            edits={
                "        digest.update(tensor.detach()": "        kept = vars(tensor).setdefault('kept', {})\n"
                "        kept.setdefault(tensor._version, tensor.detach()",
                ".numpy())": ".numpy().tobytes())\n        digest.update(kept[tensor._version])",
            },
        ),
        WrongAnswer(
            "compares the first bytes of the digest",
            fails="value",
            says="the last bytes of rank 1's message are exchanged: the result is True, should be False.",
            edits={"torch.equal(mine, other)": "torch.equal(mine[:2], other[:2])"},
        ),
        WrongAnswer(
            "compares digests as floats, of which some are NaN",
            fails="value",
            says="rank 0's result is False, should be True.",
            edits={
                "torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)": "torch.frombuffer("
                "bytearray(digest.digest()), dtype=torch.float32)"
            },
        ),
        WrongAnswer(
            "a checksum of 32 bits",
            fails="value",
            also=("digest",),
            says="the same CRC-32 and the same sums, also weighted by place: rank 0's result is True, should be False.",
            body="""
                import zlib
                crc = 0
                for tensor in [*model.parameters(), *model.buffers()]:
                    crc = zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy(), crc)
                mine = torch.tensor([crc])
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "digests in any order",
            fails="value",
            says="two parameters, which are exchanged: rank 0's result is True, should be False.",
            body="""
                parts = []
                for tensor in [*model.parameters(), *model.buffers()]:
                    parts.append(hashlib.sha256(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()).digest())
                mine = torch.tensor(list(hashlib.sha256(b"".join(sorted(parts))).digest()), dtype=torch.uint8)
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "everything as float64, which has too few digits for int64",
            fails="value",
            says="rank 1 differs in an int64 of 2⁶⁰, by 1: rank 0's result is True, should be False.",
            edits={"tensor.detach()": "(tensor if tensor.is_complex() else tensor.double()).detach()"},
        ),
        WrongAnswer(
            "takes the layout in memory for a difference",
            fails="value",
            says="flags, attributes and memory layout differ, no value does: the result is False",
            edits={"digest.update(": "digest.update(repr(tensor.stride()).encode()), digest.update("},
        ),
        WrongAnswer(
            "moves the parameters",
            fails="untouched",
            says="'transposed' lies in other memory than before, or has another shape: the answer must not change it",
            edits={
                "    digest = hashlib.sha256()": "    for each in model.parameters():\n"
                "        each.data = each.data.contiguous()\n    digest = hashlib.sha256()"
            },
        ),
        WrongAnswer(
            "leaves a buffer on the model",
            fails="untouched",
            says="leaves the buffer 'digest' on the model",
            edits={"    dist.all_gather(": "    model.register_buffer('digest', mine)\n    dist.all_gather("},
        ),
        WrongAnswer(
            "leaves the digest on the model, where the next call finds it",
            fails="untouched",
            says="leaves the attribute '_digest' on the model",
            edits={"    mine = ": "    model._digest = digest\n    mine = "},
        ),
        WrongAnswer(
            "compares bytes of digests as floats, of which some are NaN",
            fails="value",
            says="rank 0's result is False, should be True.",
            edits={"torch.equal(mine, other)": "torch.equal(mine.view(torch.float32), other.view(torch.float32))"},
        ),
        WrongAnswer(
            "refuses tensors with gaps in memory",
            fails="runs",
            says="flags, attributes and memory layout differ, no value does",
            edits={".contiguous().flatten()": ".flatten()"},
        ),
        WrongAnswer(
            "counts flags",
            fails="value",
            says="a buffer that is not in state_dict(): rank 0's result is True, should be False.",
            edits={"tensor.detach()": "(tensor.sum() if tensor.dtype == torch.bool else tensor.detach())"},
        ),
        WrongAnswer(
            "leaves float8 out, which numpy does not know",
            fails="value",
            says=": rank 0's result is True, should be False.",
            edits={"        digest.update(": "        'float8' in str(tensor.dtype) or digest.update("},
        ),
        WrongAnswer(
            "the first million bytes of each tensor",
            fails="value",
            says="rank 1 differs in the last of 300,000 numbers, which are frozen: rank 0's result is True",
            edits={".numpy()": ".numpy()[:1_000_000]"},
        ),
        WrongAnswer(
            "Python's hash(), which differs between processes",
            fails="value",
            says="equal models, with NaN and inf: the result is False",
            body="""
                tensors = [*model.parameters(), *model.buffers()]
                s = hash(tuple(bytes(t.detach().contiguous().flatten().view(torch.uint8).numpy()) for t in tensors))
                mine = torch.tensor([s])
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "four bytes of a digest, four times",
            fails="digest",
            says="what a rank sends holds 4 bytes of a digest, from which all others follow; should hold 8 to 32",
            edits={"list(digest.digest())": "list(digest.digest()[:4] * 4)"},
        ),
        WrongAnswer(
            "tensors with the same content, once",
            fails="value",
            says="'head.bias': equals 'tiny', 'large' elsewhere: rank 0's result is True, should be False.",
            body="""
                tensors = [*model.parameters(), *model.buffers()]
                contents = [t.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors]
                digest = hashlib.sha256(b"".join(dict.fromkeys(contents)))
                mine = torch.tensor(list(digest.digest()), dtype=torch.uint8)
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                return all(torch.equal(mine, other) for other in everyones)
            """,
        ),
        WrongAnswer(
            "what begins at the same address, once",
            fails="value",
            says="begin at the same place in memory: rank 0's result is True, should be False.",
            edits={
                "in [*model.parameters(), *model.buffers()]": "in {tensor.data_ptr(): tensor for tensor in "
                "[*model.parameters(), *model.buffers()]}.values()"
            },
        ),
    ),
}
