"""Lessons 06 to 10: honest mistakes and what the check says of them; other right answers."""

ANSWERS = """
no_sync
  ✗ expects no exception | restored: an exception in the block: do_sync after the block is False, should be True
    try: ⏎ yield ⏎ finally: ⏎ model.do_sync = before => yield ⏎ model.do_sync = before
  ✗ switches on, whatever was before | restored: a block: do_sync after a block inside another is True, should be False
    model.do_sync = before => model.enable_grad_sync()
  ✗ keeps exceptions | exception: an exception: what reaches the caller is nothing, should be ValueError
    finally: => except Exception: pass ⏎ finally:
  ✗ switches off after the caller's lines | value: a block: do_sync in the block is True, should be False
    model.disable_grad_sync() =>
    yield => yield ⏎ model.disable_grad_sync()
  ✓ a class with __enter__ and __exit__
    class no_sync:
        def __init__(self, model):
            self.model = model

        def __enter__(self):
            self.before = self.model.do_sync
            self.model.disable_grad_sync()

        def __exit__(self, *error):
            self.model.do_sync = self.before
train_epoch
  ✗ the remainder is left out | value: 7 micro-batches in windows of 4: the number of steps is 1, should be 2
    or i + 1 == len(batches) =>
  ✗ divides by n in the shorter window too | value: 7 micro-batches in windows of 4: the weight after step 1 is
    / window => / n
  ✗ does not divide | value: 8 micro-batches in windows of 4: the weight after step 0 is
    / window =>
  ✗ talks after each micro-batch | cost: 8 micro-batches in windows of 4: 8 collective calls of one rank, budget 2
    contextlib.nullcontext() if last else model.no_sync() => contextlib.nullcontext()
  ✗ one backward a window | passes: 8 micro-batches in windows of 4: the number of backward passes is 2, should be 8
    for i in range(0, len(batches), n):
        window = batches[i : i + n]
        (sum(mse_loss(model(inputs), targets) for inputs, targets in window) / len(window)).backward()
        model.sync_gradients()
        optimizer.step()
        optimizer.zero_grad()
time_calls
  ✗ each rank believes its own clock | value: the last rank is slow: the list is
    dist.all_reduce(taken, op=dist.ReduceOp.MAX) =>
  ✗ the sum over the ranks | value: the last rank is slow: the list is
    MAX => SUM
  ✗ counts the first call | value: the last rank is slow: the list is
    tolist()[1:] => tolist()[:-1]
  ✗ begins when it likes | together: the last rank is slow: the number of barriers is 0, should be 3
    dist.barrier() =>
  ✗ measures the waiting for the others as well | value: the last rank is slow: the list is
    dist.barrier() ⏎ began = clock() => began = clock() ⏎ dist.barrier()
forecast_step
  ✗ 2·S at any number of ranks, as published | value: 2): the result is 0.0021, should be 0.0011
    2 * (n - 1) / n => 2
  ✗ S at any number of ranks | value: 8): the result is 0.004308, should be 0.007314
    2 * (n - 1) / n * sum => sum
  ✗ one α for all messages together | value: 8): the result is 0.0071140000000000005, should be 0.007314
    alpha * len(gradients) => alpha
  ✗ bandwidth from the larger transfer alone | value: 2): the result is 0.001349, should be 0.0011
    (large_seconds - small_seconds) / (large - small) => large_seconds / large
average_when_ready
  ✗ waits in the hook | overlap: step 0: the number of messages waited for when backward returned is 6, should be 0
    works.append(dist.all_reduce(parameter.grad, async_op=True)) => dist.all_reduce(parameter.grad)
  ✗ starts in finish | overlap: step 0: the number of messages started before the first layer's backward is 0, should be
    if parameter.requires_grad: ⏎ parameter.register_post_accumulate_grad_hook(hook) => pass
    def finish(): => def finish(): ⏎     [hook(each) for each in model.parameters() if each.grad is not None]
  ✗ does not divide | value: two steps: step 0: the gradient of 'first.weight'
    parameter.grad /= dist.get_world_size() =>
  ✗ divides all gradients in finish | value: two steps: step 1: the gradient of 'seldom.weight'
    parameter.grad /= dist.get_world_size() =>
    works.clear() => works.clear() ⏎ for p in model.parameters(): p.grad is None or p.grad.div_(dist.get_world_size())
  ✗ no async_op | runs: has no attribute 'wait': without async_op=True a collective returns no handle
    , async_op=True =>
  ✗ nobody waits | waits: two steps: all_reduce was started and never waited for, 10 times
    work.wait() => pass
  ✗ keeps every handle | memory: two steps: step 0: the number of handles kept after finish() is 6, should be 0
    works.clear() =>
exposed_time
  ✗ all communication less all computing | value: (4.0, 7.0)]): the result is 0.0, should be 3.0
    sent, computed = (sum(end - start for start, end in each) for each in (communication, compute))
    return max(0.0, sent - computed)
  ✗ messages that overlap count twice | value: (2.0, 4.0)]): the result is 4.0, should be 3.0
    on_the_wire = any( => on_the_wire = sum(
    exposed += end - start => exposed += on_the_wire * (end - start)
  ✗ message by message, less what it hides behind | value: (2.0, 4.0)]): the result is 4.0, should be 3.0
    exposed = 0.0
    for start, end in communication:
        exposed += end - start - sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
    return exposed
average_in_buckets
  ✗ the counters are not reset | overlap: step 1: the number of messages started before the first layer's backward is 0,
    missing[:] = map(len, buckets) => pass
  ✗ whichever bucket is complete | value: another order on odd ranks: step 0: the gradient of 'left.weight'
    while len(on_the_way) < len(buckets) and missing[len(on_the_way)] == 0: => if missing[number_of[parameter]] == 0:
    bucket = buckets[len(on_the_way)] => bucket = buckets[number_of[parameter]]
  ✗ all with the last | overlap: step 0: the number of messages started before the first layer's backward is 0,
    missing[len(on_the_way)] == 0: => not any(missing):
  ✗ the means stay in the flat tensor | value: the same order on all ranks: step 0: the gradient of 'below.weight'
    each.grad.copy_(part.view_as(each)) => part.view_as(each)
  ✓ gradients become views of the flat tensor
    each.grad.copy_(part.view_as(each)) => each.grad = part.view_as(each)
average_through_buffer
  ✗ a new one each time | memory: set to zeros: the number of tensors that they have been views of is 2, should be 1
    def average():
        flat = torch.cat([each.grad.flatten() for each in parameters]) / dist.get_world_size()
        dist.all_reduce(flat)
        for each, part in zip(parameters, flat.split([each.numel() for each in parameters])):
            each.grad = part.view_as(each)
  ✗ takes the gradients for the views | value: five steps: gradients set to None: the gradient of '0'
    torch.div(parameter.grad, dist.get_world_size(), out=view) => view.div_(dist.get_world_size())
  ✗ copies the means | memory: set to None: the number of tensors that they have been views of is 2, should be 1
    parameter.grad = view => parameter.grad.copy_(view)
  ✗ a message for each view | cost: ranks, five steps: 10 collective calls of one rank, budget 5
    dist.all_reduce(buffer) => for view in views: dist.all_reduce(view)
  ✗ adds to what is left of the step before | value: five steps: gradients set to zeros: the gradient of '0'
    torch.div(parameter.grad, dist.get_world_size(), out=view) => view.add_(parameter.grad / dist.get_world_size())
  ✓ copies first
    torch.div(parameter.grad, dist.get_world_size(), out=view) => view.copy_(parameter.grad).div_(dist.get_world_size())
sharded_step
  ✗ the weight is still there beside its gradient | memory: elements beside its arguments, budget
    del whole => pass
    del gradient => del gradient, whole
  ✗ forgets the relu on the way back | value: 2 layers: `shards`[0] is wrong in
    delta = handed_down * below.sign() => delta = handed_down
  ✗ all-reduces the whole gradient and takes its rows | cost: bytes from one rank, budget
    dist.reduce_scatter(mine, list(gradient.split(len(shard)))) => dist.all_reduce(gradient)
    shard -= lr * mine => pass
  ✗ the mean over this rank's items | value: 2 layers: `shards`[0] is wrong in
    delta = outputs - targets => delta = (outputs - targets) / len(targets)
  ✓ one tensor for all parts, which gloo copies
    dist.reduce_scatter(mine, list(gradient.split(len(shard)))) => dist.reduce_scatter_tensor(mine, gradient)
gather_uneven
  ✗ leaves the padding in | value: rows: the result has shape
    return whole[:rows] => return whole
  ✗ rounds down | runs: raised RuntimeError: The expanded size of the tensor (1) must match the
    -(-rows // n) => max(rows // n, 1)
  ✗ asks all ranks first how many rows they have | cost: rows: 2 collective calls of one rank, budget 1
    k = -(-rows // n) => dist.all_gather([shard.new_zeros(1) for _ in range(n)], shard.new_ones(1)) ⏎ k = -(-rows // n)
  ✗ sends different sizes | runs: All ranks must make the same call, with tensors of the same shape and dtype
    padded = shard.new_zeros(k, shard.shape[1]) ⏎ padded[: len(shard)] = shard => padded = shard
  ✗ a rank without rows takes no part | runs: did not come back
    n = dist.get_world_size() => n = dist.get_world_size() ⏎ if len(shard) == 0: return shard
shard_unit
  ✗ nobody frees after the forward | memory: elements: step 0: the parameters' memory in bytes after forward is
    module.register_forward_hook(lambda *_: free()) =>
  ✗ the parameters stay until the first step | memory: memory in bytes before the first step is
    free() ⏎ module.register_forward_pre_hook => module.register_forward_pre_hook
  ✗ other memory, while autograd keeps the first | memory: step 0: the parameters' memory in bytes after forward is
    whole = flatten(parameters) => whole, shapes = flatten(parameters), [each.shape for each in parameters]
    whole.untyped_storage().resize_(whole.nbytes) => nonlocal whole; whole = shard.new_empty(n * part)
    shard.detach()) => shard.detach()) ⏎ views = zip(parameters, shapes, whole.split([*sizes, padding])) ⏎ move(views)
    def free(): => def move(views): ⏎     for each, shape, view in views: each.data = view.view(shape) ⏎ def free():
    whole.untyped_storage().resize_(0) => for each in parameters: each.data = shard.new_empty(0)
  ✗ not gathered in backward | runs: raised RuntimeError: in backward '0.weight' has no memory: gather the unit
    module.register_full_backward_pre_hook(lambda *_: gather()) =>
  ✗ the sum, not the mean | value: elements: step 0: shard.grad
    for parameter in parameters) / n => for parameter in parameters)
  ✗ leaves the whole gradients on the parameters | value: elements: step 1: shard.grad
    for parameter in parameters: ⏎ parameter.grad = None =>
  ✗ n need not divide the elements | runs: raised RuntimeError: split_with_sizes expects split_sizes have only
    -(-sum(sizes) // n) => sum(sizes) // n
  ✗ the shard is a view | memory: elements: the shard has no memory of its own: it was freed with the unit's
    [rank].clone() => [rank]
  ✗ all-reduces the whole gradient and takes its part | cost: 0 bytes from one rank, budget
    dist.reduce_scatter(shard.grad, list(gradients.split(part))) => dist.all_reduce(gradients)
"""
