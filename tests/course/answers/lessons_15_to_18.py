"""Lessons 15 to 18: honest mistakes and what the check says of them; other right answers."""

ANSWERS = """
bytes_of_rank
  ✗ one micro-batch | value: pp 4, 8 tokens
    pp * blocks * model => blocks * model
  ✗ parameters uncut by tp | value: tp 4, no tokens
    model["parameters"] // tp => model["parameters"]
  ✗ shared over all devices | value: dp 5, tp 2, pp 3
    // dp => // (dp * tp * pp)
  ✗ a float | value: is 2112000.0 (float), should be 2112000 (int)
    // dp => // dp + 0.0
devices_needed
  ✗ rounded down | value: stage 3, 0 bytes
    -(-shared // room) => shared // room
  ✗ activations are shared | value: stage 2, 1,000 bytes of act
    memory - activations - => memory -
  ✗ 0 where none helps | value: the result is 0, should be None
    None => 0
  ✗ a full GPU is refused | value: 16,000 bytes, stage 0, 0 bytes of activations: the result is None, should be 1
    room < 0 or => room <= 0 or
  ✓ one more for a remainder
    max(1, -(-shared // room)) if shared else 1 => shared // room + bool(shared % room) if shared else 1
smallest_batch
  ✗ as in an all-reduce | value: alpha = 0, n = 2: the result is 1024, should be 512
    2 * weights * (n - 1) => 4 * weights * (n - 1)
  ✗ no alpha | value: alpha = 2⁻¹⁰, n = 8
    alpha + sent => sent
  ✗ rounded down | value: is 682, should be 683
    ceil( => int(
step_seconds
  ✗ no bubble | value: pp 4:
    (layout.micro_batches + layout.pp - 1) => layout.micro_batches
  ✗ gradients after every micro-batch | value: dp 4:
    (compute + messages) + reduce => (compute + messages + reduce)
  ✗ checkpointing is free | value: with checkpointing
    (8 if again else 6) => 6
  ✗ messages in forward alone | value: tp 4:
    (12 if again else 8) => 4
  ✓ forward, backward and a second forward
    tokens, passes = layout.micro * sequence, 3 if layout.checkpointing else 2
    forward = shape.block / layout.tp * 2 * tokens / (0.55 * cluster.device.flops)
    sent = 4 * cluster.wire(layout.tp).all_gather(2 * tokens * shape.width)
    one = shape.blocks // layout.pp * (3 * forward + passes * sent + (passes - 2) * forward)
    gradients = 2 * (shape.blocks // layout.pp) * shape.block / layout.tp
    reduced = cluster.wire(layout.dp, layout.tp * layout.pp).all_reduce(gradients)
    return layout.micro_batches * one + (layout.pp - 1) * one + reduced
choose_layout
  ✗ no memory test | value: does not fit: a rank needs
    > 0.9 * cluster => > 1e9 * cluster
  ✗ no checkpointing | value: is None, should be a layout
    (False, True) => (False,)
  ✗ no pipeline | value: is None, should be a layout
    min(devices, shape.blocks) + 1 => 2
  ✗ no tp | value:  takes
    min(devices, cluster.per_node) + 1 => 2
  ✗ idle GPUs | value: 9 GPUs, and there are 10
    dp * tp * pp != devices => not dp
  ✗ sequences left over | value: not divide the batch of 100
    or batch % dp =>
  ✓ the last of equals
    if seconds < least => if seconds <= least
    (False, True) => (True, False)
hierarchical_all_reduce
  ✗ flat | group: each collective is all ranks, should be mesh["local"], mesh["host"], mesh["local"] | n=4
    dist.all_reduce(tensor)
  ✗ the groups have changed places | group: the group of each collective is mesh["host"],
    mesh["local"].get_group(), mesh["host"] => mesh["host"].get_group(), mesh["local"]
  ✗ must divide | runs: shape (3, 5)
    -(-size // n) => size // n
  ✗ no all-gather | value: `tensor` is
    dist.all_gather(list(parts), mine, group=local) => parts[dist.get_rank(local)] = mine
  ✓ whole tensors in place of lists
    dist.reduce_scatter(mine, list(parts), => dist.reduce_scatter_tensor(mine, parts.view(-1),
    dist.all_gather(list(parts), mine, => dist.all_gather_into_tensor(parts.view(-1), mine,
bytes_out_of_hosts
  ✗ half | value: in blocks: ring [0, 1, 2, 3]: the result['a'] is 30
    2 * (n - 1) => (n - 1)
  ✗ inside counted | value: in blocks: ring [0, 1, 2, 3]: the result['a'] is 120, should be 60
    host_of[rank] != host_of[successor] => rank != successor
  ✗ an open ring | value: the result['b'] is 0
    enumerate(ring) => enumerate(ring[:-1])
  ✗ hosts missing | value: the result is {'b': 0}, should be {'a': 0, 'b': 0}
    host_of.values() => (host_of[rank] for rank in ring)
save_and_load
  ✗ into the file itself | value: after a save that was interrupted, load raises
    partial) => path)
    os.replace(partial, path) => pass
  ✗ the optimizer is left out | value: after a step with the loaded optimizer
    optimizer.load_state_dict(saved["optimizer"]) =>
  ✗ nothing was saved yet | runs: FileNotFoundError
    if not os.path.exists(path): ⏎ return 0 =>
  ✓ a name with a tilde
    f"{path}.partial" => path + "~"
    os.replace(partial, path) => os.rename(partial, path)
resume
  ✗ the new batch size | value: your step has n × per_rank = 6 items, should have ranks × per_rank
    saved["ranks"] * saved => n * saved
  ✗ the same order in each epoch | value: your step 4 is the run's step 0, should be the run's step 4
    order(epoch) => order(0)
  ✗ the remainder is left out | value: your step 4 is the run's step 5, should be the run's step 4
    -(-saved["items"] // batch) => saved["items"] // batch
  ✗ blocks | value: the part of rank 0 of 4 is [[
    items[rank::n] => items[rank * len(items) // n : (rank + 1) * len(items) // n]
saving_interval
  ✗ a host's failures | value: hosts=24
    / hosts =>
  ✗ no root | value: hosts=1
    sqrt( => (
  ✗ days for seconds | value: hosts=1
    * 24 * 3600 =>
  ✓ less the time of saving
    sqrt(2 * save * between_failures) => (2 * save * between_failures) ** 0.5 - save
faulty_host
  ✗ 127.0.1.1 always | value: recording job_3
    if "Unable => if "127.0.1.1" in log: return host, "name" ⏎ if "Unable
  ✗ who timed out | value: recording job_
    f"trying to connect to ({own_address}," => "timed out"
  ✗ the first host | value: recording job_1
    return list(logs)[0], "interface"
  ✓ by the endpoint
    f"trying to connect to ({own_address}," => f"127.0.1.1       {host}" in log and f"endpoint {own_address}:"
which_ranks
  ✗ along the first dimension first | value: dp of 2 × 2 × 2: the result
    [names.index(dim) + 1 :] => [: names.index(dim)]
  ✗ its own size counts, too | value: dp of 2 × 2 × 2: the result
    index(dim) + 1 : => index(dim) :
  ✗ always neighbours | value: dp of 2 × 2 × 2: the result
    rank // apart => rank
  ✓ block by block
    size, n = mesh[dim], prod(mesh.values())
    apart = prod([size for name, size in mesh.items()][list(mesh).index(dim) + 1 :])
    firsts = [block + i for block in range(0, n, apart * size) for i in range(apart)]
    return [[first + k * apart for k in range(size)] for first in firsts]
mesh_norm
  ✗ what is not cut counts tp times | value: some are whole: the result
    / tp =>
  ✗ the sum of the ranks' norms | value: slices alone: the result
    dist.all_reduce(total) => total.sqrt_() ⏎ dist.all_reduce(total)
    total.sqrt() => total
  ✗ this rank's norm | value: slices alone: the result
    dist.all_reduce(total) =>
  ✓ each tensor counts on one rank
    mine = slices + (whole if dist.get_rank() % tp == 0 else [])
    total = torch.tensor(sum((each.norm().item() ** 2 for each in mine), 0.0), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) ** 0.5
best_order
  ✗ the most bytes come first | value: tp sends most: bytes that leave
    min(permutations => max(permutations
  ✗ the one that sends most is last, whatever its size | value: bytes that leave
    min(permutations(mesh), key=leaving) => sorted(mesh, key=sent.get)
  ✗ no order | valid: is no order of
    list(min(permutations(mesh), key=leaving)) => max(sent)
outer_step
  ✗ uphill | value: the mean of the ranks: meeting 0: params[0]
    (last - mine) => (mine - last)
  ✗ momentum without Nesterov | value: with momentum: meeting 0
    gradient + momentum * speed => speed
  ✗ agreed stays behind | value: the mean of the ranks: meeting 0: agreed[0]
    last.sub_( => mine.copy_(last -
    mine.copy_(last) =>
  ✗ the velocities are averaged, too | cost: budget
    last.sub_ => dist.all_reduce(speed.div_(dist.get_world_size())) ⏎ last.sub_
  ✓ one step for each term
    last.sub_(lr * (gradient + momentum * speed)) => last -= lr * gradient + lr * momentum * speed
send_largest
  ✗ without feedback | value: 2 of 6: step 0: residual
    residual += gradient => residual.copy_(gradient)
    residual[places] = 0 => residual.zero_()
  ✗ the sum | value: step 0: gradient
    all_values / n => all_values
  ✗ two ranks at one place: one is lost | value: step
    .index_add_(0, all_places, all_values / n) => [all_places] = all_values / n
  ✗ an all-reduce of everything | cost: budget
    dist.all_gather(list(all_values.split(k)), values) =>
    dist.all_gather(list(all_places.split(k)), places) =>
    .index_add_(0, all_places, all_values / n) => [places] = values / n ⏎ dist.all_reduce(gradient)
steps_between
  ✗ half of the ring | value: two ranks: the result is
    2 * (n - 1) => n - 1
  ✗ one latency | value: few bytes: the result is
    rounds * latency => latency
  ✗ rounded down | value: the result is
    ceil(seconds / compute) => int(seconds / compute)
"""
