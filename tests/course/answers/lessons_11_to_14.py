"""Lessons 11 to 14b: honest mistakes and what the check says of them; other right answers."""

ANSWERS = """
sharded_optimizer
  ✗ an optimizer for all | memory: n + 1 parameters: step 0: the number of parameters that have state is
    params[rank::n] => params
  ✗ clears its own share only | value: after zero_grad() in step 0: the gradient of '1' is
    for parameter in params: ⏎ parameter.grad = None => own.zero_grad()
  ✗ nobody hears of the updates | value: step 0: '1' is [1, 1, 1, 1], should be [1.1, 1.1, 1.1, 1.1]
    dist.broadcast(parameter.detach(), src=i % n) => pass
  ✗ takes everything from rank 0 | value: step 0: '1' is [1, 1, 1, 1], should be [1.1, 1.1, 1.1, 1.1]
    src=i % n => src=0
  ✗ only the owner calls | runs: All ranks must make the same call, with tensors of the same shape and dtype
    dist.broadcast(parameter => if i % n == rank: dist.broadcast(parameter
reduce_to_owners
  ✗ reads what reduce leaves behind on the others | value: parameters: the gradient of '1' is
    if i % n != rank: ⏎ parameter.grad = None =>
  ✗ an all-reduce, of which n - 1 throw the result away | cost: bytes from one rank, budget
    dist.reduce(parameter.grad, dst=i % n) => dist.all_reduce(parameter.grad)
  ✗ the sum, not the mean | value: parameters: the gradient of '0' is
    parameter.grad /= n =>
  ✗ reduces everything to rank 0 | value: parameters: the gradient of '1' is
    dst=i % n => dst=0
bytes_held
  ✗ ZeRO-1 shares out the gradients too | value: bytes_held(8000, 8, 1): the result is 44000, should be 72000
    share if stage >= 2 => share if stage >= 1
  ✗ one number of state per parameter | value: bytes_held(1000, 1, 0): the result is 12000, should be 16000
    2 * (share => (share
  ✗ counts numbers, not bytes | value: bytes_held(1000, 1, 0): the result is 4000, should be 16000
    return 4 * => return
checkpointed
  ✗ nothing is recomputed | memory: one block: the number of elements
    return function(x)
  ✗ the second call draws new numbers | value: two blocks with dropout: the gradient of x
    torch.set_rng_state(ctx.random) =>
  ✗ the generator stays where the second call has left it | next: the number drawn afterwards
    with torch.random.fork_rng(devices=[]), torch.enable_grad() => with torch.enable_grad()
  ✗ the parameters are forgotten | value: one block: block 0: the gradient of '0.weight' is None
    function(again).backward(gradient) => (own,) = torch.autograd.grad(function(again), again, gradient)
    return again.grad => return own
  ✓ torch's own
    import torch.utils.checkpoint
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=True)
choose_blocks
  ✗ what frees most bytes for a second first | time: should be
    chosen, kept = [], sum(saved)
    for i in sorted(range(len(saved)), key=lambda i: -saved[i] / seconds[i]):
        if kept > budget:
            chosen.append(i)
            kept -= saved[i]
    return chosen
  ✗ all of them | time: 40): the time of the recomputed blocks is 18, should be 12
    return list(range(len(saved)))
  ✗ those to keep | valid: is 64, should be 40
    fewest[1] => [i for i in blocks if i not in fewest[1]]
split_step
  ✗ what overlaps is counted twice | value: the result is [6, 1, 4, 0.0], should be [6.0, 0.0, 1.0, 1.0]
    def seconds(some):
        return sum(min(b, step[1]) - max(a, step[0]) for a, b in some if b > step[0] and a < step[1])
    ready = [max(called for called, _ in same) for same in zip(*calls)]
    parts = [seconds(computing), seconds((called, since) for (called, _), since in zip(calls[rank], ready))]
    parts.append(seconds((since, ended) for (_, ended), since in zip(calls[rank], ready)))
    return [*parts, max(0.0, step[1] - step[0] - sum(parts))]
  ✗ ready as soon as this rank has called | value: the result is [3.0, 0.0, 5.0, 0.0], should be [3.0, 3.0, 2.0, 0.0]
    max(called for called, _ in same) => same[rank][0]
  ✗ beyond the step | value: the result is [0.0, 4.0, 5.0, 0.0], should be [0.0, 2.0, 2.0, 0.0]
    if start <= at <= end =>
  ✗ waiting before transfer | value: the result is [1.0, 5.0, 3.0, 0.0], should be [1.0, 2.0, 6.0, 0.0]
    elif any(since => elif not any(called <= a and b <= since for called, since, _ in mine) and any(since
  ✗ communication before computing | value: the result is [2.0, 1.0, 4.0, 1.0], should be [6.0, 0.0, 1.0, 1.0]
    if any(since <= a and b <= until => if all(b <= x or y <= a for x, _, y in mine) and any(since <= a and b <= until
find_straggler
  ✗ last most often | value: rank 0 is late often, the last rank once and for long: the result is 0, should be
    += sum(last - at for at in same) => += last > min(same)
  ✗ the rank that waits most | value: the last rank is late: the result is 0, should be
    last = max(same) => last = min(same)
    sum(last - at => sum(at - last
  ✗ once for each collective | value: one for all: the result is 0, should be 3 | n=4
    sum(last - at for at in same) => last - min(same)
  ✗ among all ranks, not in the group | value: the result is 3, should be 2. Ranks 2–3 too | n=4
    return waited_for.index(most) => return dist.get_process_group_ranks(group)[waited_for.index(most)]
culprit
  ✗ who waits least is the straggler | value: loader planted: the result is ['straggler', 0], should be ['loader', 1]
    waits = [sum(step[rank]["waiting"] for step in steps) for rank in range(len(steps[0]))]
    return ("straggler", waits.index(min(waits))) if max(waits) else ("last bucket", None)
  ✗ after loading, who waits least | value: item() planted: the result is ['straggler', 1], should be ['.item()', None]
    step[rank]["forward"] + step[rank]["backward"] => -step[rank]["waiting"]
  ✗ takes noise for a fault | value: item() planted: the result is ['straggler', 0], should be ['.item()', None]
    statistics.median(behind) > 0.2 => statistics.median(behind) > 0.02
  ✗ a stall counts, by the mean | value: planted: the result is ['loader', 0], should be
    statistics.median(step[rank]["data"] for step in steps) => statistics.mean(step[rank]["data"] for step in steps)
  ✗ ignores the messages' sizes | value: item() planted: the result is ['last bucket', None]
    small / len(steps) > transfer / 2 => len(messages) > 1000
  ✗ names a rank where it is no rank's | value: uneven batches planted: the result[1] is 2, should be None
    return "uneven batches", None => return "uneven batches", often
sync_batch_norm
  ✗ each rank's own statistics | value: rank r has 2 + r rows: the result is
    total = mine.clone() ⏎ dist.all_reduce(total, group=group) => total = mine.clone()
  ✗ the gradient of the total stays here | value: rank r has 2 + r rows: the gradient of the first argument is
    dist.all_reduce(total, group=group)  # => #
  ✗ the mean of the ranks' means | value: rank r has 2 + r rows: the result is
    exact.sum(others), exact.square().sum(others) => exact.mean(others), exact.square().mean(others)
    total[:features] / count => total[:features] / dist.get_world_size(group)
    total[features:-1] / count => total[features:-1] / dist.get_world_size(group)
  ✗ rows are counted, not values | value: two values a row: the result is
    x.numel() / features => len(x)
  ✗ the biased variance in the running one | value: rank r has 2 + r rows: the second argument: 'running_var' is
    variance * count / (count - 1) => variance
one_f_one_b
  ✗ GPipe | memory: (4, 8): the most activations that rank 0 holds is 8, should be 4
    for r, row in enumerate(rows):
        row += [Action(kind, r, i) for kind in "FB" for i in range(m)]
  ✗ none ahead | time: its length in units is 96.0, should be 33.0
    min(p - 1 - r, m) => 0
  ✗ as many ahead on every rank | memory: the most activations that rank 1 holds is 4, should be 3
    min(p - 1 - r, m) => min(p - 1, m)
  ✗ m < p is not thought of | value: (4, 2): F2 of stage 0 does not belong into a schedule of 2 micro-batches
    min(p - 1 - r, m) => p - 1 - r
  ✓ plain tuples
    row.append(Action("F", r, ahead + i)) => row.append(("F", r, ahead + i))
zero_bubble
  ✗ each W at once | time: (4, 8): its length in units is 30.0, should be 27.0
    i >= r => i >= 0
    Action("W", stage, i - r) => Action("W", stage, i)
    range(m - r, m) => ()
  ✗ every W at the end | memory: (4, 8): the most activations that rank 0 holds is 8, should be 4
    i >= r => False
    range(m - r, m) => range(m)
  ✗ the last Ws are lost | value: W7 of stage 1 is missing
    range(m - r, m) => ()
  ✗ W before its I | value: the schedule deadlocks: rank 0, at W0 of stage 0, waits for the gradient of stage 0
    row.append(Action("I" if kind == "B" else kind, stage, i)) => row += [(k, r, i) for k in kind.replace("B", "WI")]
    i >= r => False
    range(m - r, m) => ()
who_is_stuck
  ✗ one pass | value: GPipe, 4 ranks
    while able: => for _ in rows[:1]:
  ✗ the next stage's B is forgotten | value: each waits for the other: the result is [], should be [0, 1]
    | ({Action("B", stage + 1, i)} if stage < last else set()) =>
  ✗ rank 0 waits for nobody | value: the second lap before the first: the result is [], should be [0, 1]
    if stage else set() => if stage % len(rows) else set()
  ✗ ranks for stages | value: some finish, some don't
    if stage < last else => if stage < len(rows) - 1 else
forwards_ahead
  ✗ no + 1 | value: forwards_ahead(1.0, 2.0, 0.0): the result is 0, should be 1
    1 + ceil => ceil
  ✗ one hop | value: forwards_ahead(1.0, 2.0, 1.625): the result is 2, should be 3
    2 * hop => hop
  ✗ rounded down | value: forwards_ahead(1.0, 2.0, 1.625): the result is 2, should be 3
    ceil( => int(
f_and_g
  ✗ f and g swapped | value: 1], should be [1, 2, 3, 4, 5, 6]
    return F.apply, G.apply => return G.apply, F.apply
  ✗ g adds up in both directions | value: a matrix: x's gradient through g is
    return gradient => return add_up(gradient)
  ✗ g takes the mean | value: a matrix: g(x) is
    return add_up(y) => return add_up(y) / dist.get_world_size(group)
  ✗ no gradient passes g | runs: raised RuntimeError: element 0 of tensors does not require grad and does not
    return F.apply, G.apply => return F.apply, lambda y: add_up(y.detach())
  ✗ sums the caller's tensor | untouched: a matrix: the gradient that f's backward was given was changed: it is
    total = tensor.clone(memory_format=torch.contiguous_format) => total = tensor.detach()
  ✓ f by a hook
    def add_up(tensor): => def f(y): ⏎     y.requires_grad and y.register_hook(add_up); return y ⏎ def add_up(tensor):
    return F.apply, => return lambda x: f(1 * x),
slice_qkv
  ✗ rows of the whole, whatever they belong to | value: 4 heads of q, 4 of k and v, rank 1 of 2: the result is
    return weight.chunk(n)[rank]
  ✗ three equal parts, with fewer heads of k and v | value: 8 heads of q, 2 of k and v, rank 0 of 2: the result is
    weight.split([heads * rows, kv_heads * rows, kv_heads * rows]) => weight.chunk(3)
  ✗ all of k and v | value: 4 heads of q, 4 of k and v, rank 1 of 2: the result has shape (20, 3), should have (12, 3)
    part.chunk(n)[rank] for part in parts => parts[0].chunk(n)[rank], *parts[1:]
sliced_cross_entropy
  ✗ each rank subtracts its own largest logit | value: small logits: the loss is 2
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group) =>
  ✗ subtracts nothing | value: logits of about 1,000, and far below: the loss is inf, should be
    (logits - largest[:, None]).exp() => logits.exp()
    logits[mine, here[mine]] - largest[mine] => logits[mine, here[mine]]
  ✗ takes its columns for the first | value: small logits: the loss is 2
    targets - columns * dist.get_rank(group) => targets
  ✗ gathers the logits | cost: bytes from one rank, budget | n=4
    n = dist.get_world_size(group)
    parts = [torch.empty_like(logits) for _ in range(n)]
    dist.all_gather(parts, logits, group=group)
    whole = torch.cat(parts, dim=1)
    gradient = whole.softmax(dim=1) - torch.nn.functional.one_hot(targets, n * columns)
    gradient = gradient.chunk(n, dim=1)[dist.get_rank(group)] / tokens
    return [torch.nn.functional.cross_entropy(whole, targets), gradient]
  ✗ the gradient of the sum, beside the mean loss | value: small logits: the gradient
    gradient.div_(tokens) => gradient
shift
  ✗ to the left | value: the result is [10, 11, 12, 13], should be [30, 31, 32, 33]. Ranks 1–3 too | n=4
    return hand_on(mine, 1) => return hand_on(mine, -1)
  ✗ gradients too | value: the gradient of `tensor` is that of rank 3's result, should be that of rank 1's | n=4
    return hand_on(gradient, -1) => return hand_on(gradient, 1)
  ✗ unknown to autograd | runs: raised RuntimeError: element 0 of tensors does not require grad and does not
    return Shift.apply(tensor) => return hand_on(tensor.detach(), 1)
  ✗ every rank sends before it receives | runs: Rank 0 sent to rank 1 once, rank 1 received nothing
    sending = dist.isend( => dist.send(
    sending.wait() =>
  ✗ even ranks send first, odd ones after them | cost: ranks, a vector: 4 rounds one after another, budget 2
    sending = dist.isend(mine, => send = lambda: dist.send(mine,
    dist.recv(arriving, => rank % 2 or send() ⏎ dist.recv(arriving,
    sending.wait() => rank % 2 and send()
  ✗ asks for the default group's numbers | runs: sends to itself | n=4
    rank, n = dist.get_rank(group), dist => rank, n = dist.get_rank(), dist
  ✓ both messages in one batch
    sending = dist.isend(mine, => sending = dist.P2POp(dist.isend, mine,
    group_dst=(rank + step) % n => group_peer=(rank + step) % n
    dist.recv(arriving, => receiving = dist.P2POp(dist.irecv, arriving,
    group_src=(rank - step) % n => group_peer=(rank - step) % n
    sending.wait() => [work.wait() for work in dist.batch_isend_irecv([receiving, sending])]
send_rows
  ✗ as many come as go | runs: raised ValueError: rank
    received = arriving.tolist() => received = counts
  ✗ swaps what goes and comes | runs: `dist.all_to_all_single(result, rows.contiguous(), counts, received,
    rows.contiguous(), received, counts => rows.contiguous(), counts, received
  ✗ a rank without rows leaves | runs: Rank 1 called 1 collective, rank 0 none
    leaving = torch.tensor( => if not sum(counts): return rows ⏎ leaving = torch.tensor(
"""
