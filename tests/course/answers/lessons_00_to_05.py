"""Lessons 00 to 05: honest mistakes and what the check says of them; other right answers."""

ANSWERS = r"""
print_together
  ✗ every rank prints | value: all ranks agree: what it prints is 'ready\n', should be ''
    rank == 0 => True
  ✗ rank 0 speaks for all | value: all ranks differ: what it prints is 'x = 0\n', should be 'rank 0: x = 0\n'
    len(set(texts)) > 1 => False
  ✗ compares with rank 0's | value: all ranks differ: what it prints is 'x = 0\n', should be 'rank 0: x = 0\n'
    len(set(texts)) > 1 => text != texts[0]
  ✗ only rank 0 asks for the texts, and waits for ever | runs: all ranks agree: Rank 0 did not come back
    dist.all_gather_object(texts, text) => if rank == 0: dist.all_gather_object(texts, text)
get
  ✗ after the last rank comes none | value: among all ranks: the result is
    (dist.get_rank(group) + 1) % dist.get_world_size(group) => dist.get_rank(group) + 1
  ✗ counts among all ranks although a mesh is given | value: mesh: the result is
    (dist.get_rank(group) + 1) % dist.get_world_size(group) => (dist.get_rank() + 1) % dist.get_world_size()
  ✗ the left neighbour | value: among all ranks: the result is 3, should be 1. Ranks 1–3 too | n=4
    + 1 => - 1
all_reduce_in_two_steps
  ✗ the sum stays at the root | value: root=0: `tensor` is
    dist.broadcast(tensor, root) =>
  ✗ hands on rank 0's tensor, whoever holds the sum | value: root=1: `tensor` is
    dist.broadcast(tensor, root) => dist.broadcast(tensor, 0)
  ✗ torch's own | steps: what it calls is all_reduce, should be reduce at rank 0, then broadcast at rank 0
    dist.all_reduce(tensor)
  ✗ only the root calls reduce | runs: All ranks must make the same call
    dist.reduce(tensor, root) => if dist.get_rank() == root: dist.reduce(tensor, root)
all_gather_uneven
  ✗ leaves the padding in | value: rank r has r + 1 elements: the result[0] has shape
    pieces[rank][: int(lengths[rank])] => pieces[rank]
  ✗ a list of n times the same tensor | value: the last rank has none: the result[0] is
    [tensor.new_empty(longest) for _ in range(world_size)] => [tensor.new_empty(longest)] * world_size
  ✗ pickles the tensors | cost: bytes from one rank, budget
    pieces = [None] * world_size
    dist.all_gather_object(pieces, tensor)
  ✗ sends tensors of different lengths | runs: raised ValueError: rank 0 called all_gather of 1 × float32, rank
    pieces = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(pieces, tensor)
  ✓ rows of one matrix
    lengths = torch.empty(world_size, dtype=torch.int64)
    dist.all_gather(list(lengths.split(1)), torch.tensor([len(tensor)]))
    rows = tensor.new_empty(world_size, lengths.max())
    dist.all_gather(list(rows), torch.nn.functional.pad(tensor, (0, rows.shape[1] - len(tensor)), value=7))
    pieces = [row[:length] for row, length in zip(rows, lengths.tolist())]
tree_broadcast
  ✗ the source is taken to be rank 0 | value: src=1: `tensor`
    (rank - root) % n => rank
  ✗ the reach grows by one a round: the last is served twice | cost: ranks, src=0: 4 messages, budget 3 | n=4
    reach *= 2 => reach += 1
  ✗ a star: the source serves all | cost: ranks, src=0: 12,000 bytes from one rank, budget 8,000 | n=4
    for other in range(n):
        if rank == root and other != root:
            dist.send(tensor, group=group, group_dst=other)
        elif rank == other != root:
            dist.recv(tensor, group=group, group_src=root)
  ✗ torch's own broadcast | cost: ranks, src=0: 1 collective calls of one rank, budget 0
    dist.broadcast(tensor, src, group)
  ✗ forgets the group | group: recv goes through all ranks, should stay in `group` | n=4
    dist.send(tensor, group=group, group_dst=(rank + reach) % n) => dist.send(tensor, (rank + reach) % n)
    dist.recv(tensor, group=group, group_src=(rank - reach) % n) => dist.recv(tensor, (rank - reach) % n)
reduce
  ✗ sums up in the caller's tensor | untouched: dst=0: `tensor` was changed: it is | n=4
    total = arriving.add_(total) => total = tensor.add_(arriving)
  ✗ keeps all that arrives | memory: 3,000 elements beside its arguments, budget 2,000 (a name keeps its tensor | n=4
    total = arriving.add_(total) => total = arriving + total
  ✗ the tree always ends at rank 0 | value: dst=1: `tensor`
    (rank - root) % n => rank
  ✗ dst receives from one after the other | cost: ranks, dst=0: 3 rounds one after another, budget 2 | n=4
    if rank != root:
        dist.send(tensor, group=group, group_dst=root)
    else:
        arriving = torch.empty_like(tensor)
        for other in {*range(n)} - {root}:
            dist.recv(arriving, group=group, group_src=other)
            tensor += arriving
  ✗ forgets the group | group: goes through all ranks, should stay in `group` | n=4
    dist.send(total, group=group, group_dst=(rank - reach) % n) => dist.send(total, (rank - reach) % n)
    dist.recv(arriving, group=group, group_src=(rank + reach) % n) => dist.recv(arriving, (rank + reach) % n)
ring_all_reduce
  ✗ the false ring: whole tensors go round (pytorch/tutorials#1039) | cost: budget
    total = tensor.clone()
    leaving, arriving = tensor.clone(), torch.empty_like(tensor)
    for step in range(n - 1):
        send_recv(leaving, (rank + 1) % n, arriving, (rank - 1) % n, group)
        total += arriving
        leaving, arriving = arriving, leaving
    tensor.copy_(total)
  ✗ takes n to divide the number of elements | runs: raised RuntimeError: shape '
    tensor.view(-1).tensor_split(n) => tensor.view(n, -1)
  ✗ chunk(n) makes fewer than n of a small tensor | runs: raised IndexError: tuple index out of range
    tensor_split(n) => chunk(n)
  ✗ the complete chunks are never passed on | value: elements: the result is
    for step in range(n - 1):  # all-gather => for step in range(0):  # all-gather
  ✗ every rank sends first, then receives | runs: Rank 0 sent to rank 1 once, rank 1 received nothing
    send_recv(chunks[(rank - step) % n], right, => dist.send(chunks[(rank - step) % n], right); dist.recv(
  ✓ each rank collects its own chunk from all, then gives it to all
    chunks = tensor.view(-1).tensor_split(n)
    arriving = torch.empty_like(chunks[rank])
    for s in range(1, n):
        send_recv(chunks[(rank + s) % n], (rank + s) % n, arriving, (rank - s) % n, group)
        chunks[rank].add_(arriving)
    for s in range(1, n):
        send_recv(chunks[rank], (rank + s) % n, chunks[(rank - s) % n], (rank - s) % n, group)
average_gradients
  ✗ the sum | value: all ranks use everything: the gradient of 'body.weight' is
    parameter.grad /= world_size =>
  ✗ a rank without a gradient skips | runs: is frozen, rank 0 leaves the head out: Rank 0 had returned. Rank
    parameter.grad = torch.zeros_like(parameter) => continue
  ✗ layer by layer, so the tied weight twice | cost: everything: 5 collective calls of one rank, budget 4.
    model.parameters(): => (p for layer in model.children() for p in layer.parameters()):
  ✗ divides after the sum | value: half precision, large gradients: the gradient of 'weight' is [inf, inf]
    parameter.grad /= world_size =>
    dist.all_reduce(parameter.grad) => dist.all_reduce(parameter.grad) ⏎ parameter.grad /= world_size
  ✗ frozen ones too | untouched: rank 0 leaves the head out: the gradient of 'body.weight' was changed: it is [0, 0
    if not parameter.requires_grad: ⏎ continue =>
  ✗ the package's, which a later cell imports | own: This is scratch_ddp.course.lessons.lesson_03.average_gradients, not
    from scratch_ddp.course.lessons.lesson_03 import average_gradients
  ✓ one message for all
    trainable = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trainable])
    dist.all_reduce(flat.div_(world_size))
    for p, mean in zip(trainable, flat.split([p.numel() for p in trainable])):
        p.grad = mean.view_as(p)
average_unequal
  ✗ the mean of the ranks' means | value: rank r has 2r + 1 items: the gradient of
    items / total.item() => 1 / dist.get_world_size()
  ✗ 0 times NaN | value: the gradient of 'body.weight' is wrong in 9 of 9 elements: element 0 is nan
    items == 0 => parameter.grad is None
  ✗ a rank without items returns | runs: rank 0 has no items, its gradients are NaN: Rank 0 had returned. Rank
    for parameter in => if items == 0: return ⏎ for parameter in
  ✗ asks for the total once per parameter | cost: 2r + 1 items: 8 collective calls of one rank, budget 5.
    total = torch.tensor(items, device=next(model.parameters()).device) ⏎ dist.all_reduce(total) =>
    if items == 0: => dist.all_reduce(total := torch.tensor(items)) ⏎ if items == 0:
same_on_all_ranks
  ✗ the sum of all bytes | value: the last rank has two weights in another order: the result is True, should be False
    digest = hashlib.sha256() => numbers = []
    digest.update(tensor => numbers.extend(tensor
    list(digest.digest()), dtype=torch.uint8 => sum(map(int, numbers)), dtype=torch.int64
  ✗ Python's hash, which is the same for -1 and -2 | value: the result is
    digest = hashlib.sha256() => numbers = []
    digest.update(tensor => numbers.extend(tensor
    .view(torch.uint8).numpy() => .tolist()
    list(digest.digest()), dtype=torch.uint8 => hash(tuple(numbers)), dtype=torch.int64
  ✗ prints the values, which rounds them | value: differs in its last bit: the result is True, should be False
    tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() => str(tensor).encode()
  ✗ forgets the buffers | value: the last rank has another buffer: the result is True, should be False
    [*model.parameters(), *model.buffers()] => model.parameters()
  ✗ all compare with rank 0 | value: has two weights in another order: the result is True, should be False
    for other in everyones) => for other in everyones[:1])
  ✗ sends the whole model | cost: bytes from one rank, budget
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device) => mine = torch.cat(numbers)
    digest.update(tensor => numbers.append(tensor
    .view(torch.uint8).numpy() => .double()
    digest = hashlib.sha256() => numbers = []
accuracy_once
  ✗ counts what the sampler has filled up with | value: items: the result is 0
    hits[places < items].sum() => hits.sum()
    right.item() / items => right.item() / (n * len(hits))
  ✗ the mean of the ranks' accuracies | value: items: the result is 0
    hits[places < items].sum() => hits[places < items].double().mean()
    right.item() / items => right.item() / n
  ✗ takes the shards for contiguous ones | value: items: the result is | n=4
    rank + n * torch.arange(len(hits), device=hits.device) => rank * len(hits) + torch.arange(len(hits))
  ✗ each rank's own accuracy | value: items: the result is 0
    return hits.double().mean().item()
  ✗ as many of each rank, rounded down | value: items: the result is 0
    places < items => places < items // n * n
  ✓ a tensor
    right.item() / items => right / items
  ✗ collects everybody's predictions | cost: 0 bytes from one rank, budget
    everyones = [torch.empty_like(hits) for _ in range(n)]
    dist.all_gather(everyones, hits)
    return torch.stack(everyones, dim=1).flatten()[:items].sum().item() / items
token_mean
  ✗ the mean over this rank's own tokens | value: rows of different lengths: the result is
    return losses[counts].mean()
  ✗ forgets that sync_gradients divides once more | value: rows of different lengths: the result is 0
    * n / tokens => / tokens
  ✗ a number without a graph | runs: raised AttributeError: 'float' object has no attribute 'pow'
    losses[counts].sum() * n / tokens => losses[counts].sum().item() * n / tokens.item()
  ✗ a rank without tokens returns early | runs: Rank 1 called 1 collective, rank 0 none
    tokens = counts.sum() => if not counts.any(): return losses.sum() * 0 ⏎ tokens = counts.sum()
"""
