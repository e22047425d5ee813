"""Lessons 15 to 18: honest mistakes and what the check says of them; other right answers."""

ANSWERS = """
bytes_of_rank
  ✗ one micro-batch | value: 1, 1, 4, 0, 8): the result is
    pp * blocks * model => blocks * model
  ✗ parameters uncut by tp | value: 1, 4, 1, 0, 8): the result is
    model["parameters"] // tp => model["parameters"]
  ✗ shared over all devices | value: 5, 2, 3, 2, 8): the result is
    // dp => // (dp * tp * pp)
  ✗ a float | value: is 2112000.0 (float), should be 2112000 (int)
    // dp => // dp + 0.0
devices_needed
  ✗ rounded down | value: devices_needed(1000, 5000, 3, 0): the result is 3, should be 4
    -(-shared // room) => shared // room
  ✗ activations are shared | value: devices_needed(1000, 5000, 2, 1000): the result is 5, should be 7
    memory - activations - => memory -
  ✗ 0 where none helps | value: the result is 0, should be None
    None => 0
  ✗ a full GPU is refused | value: devices_needed(1000, 16000, 0, 0): the result is None, should be 1
    room < 0 or => room <= 0 or
smallest_batch
  ✗ as in an all-reduce | value: 0.0, 1048576, 2): the result is 1024, should be 512
    2 * weights * (n - 1) => 4 * weights * (n - 1)
  ✗ no alpha | value: 8): the result is 896, should be 1408
    alpha + sent => sent
  ✗ rounded down | value: is 682, should be 683
    ceil( => int(
step_seconds
  ✗ no bubble | value: pp 4, 3 micro-batches of 1:
    (layout.micro_batches + layout.pp - 1) => layout.micro_batches
  ✗ gradients after every micro-batch | value: dp 4 ×
    (compute + messages) + reduce => (compute + messages + reduce)
  ✗ checkpointing is free | value: checkpointing: the result
    (8 if again else 6) => 6
  ✗ messages in forward alone | value: tp 4 ×
    (12 if again else 8) => 4
choose_layout
  ✗ no memory test | memory: the bytes of a rank, or 0.9 of the GPU's if it needs less, is
    > 0.9 * cluster => > 1e9 * cluster
  ✗ no checkpointing | value: is None, should be a layout
    (False, True) => (False,)
  ✗ no pipeline | value: is None, should be a layout
    min(devices, shape.blocks) + 1 => 2
  ✗ no tp | time: the seconds of a step is
    min(devices, cluster.per_node) + 1 => 2
  ✗ idle GPUs | value: these are 9 GPUs, and there are 10
    dp * tp * pp != devices => not dp
  ✗ sequences left over | value: GPUs of a node / tp is [36, 0, 0, 0], should be [0, 0, 0, 0]
    or batch % dp =>
  ✓ the last of equals
    if seconds < least => if seconds <= least
    (False, True) => (True, False)
hierarchical_all_reduce
  ✗ flat | group: each collective is all ranks, should be mesh["local"], mesh["host"], mesh["local"] | n=4
    dist.all_reduce(tensor)
  ✗ the groups have changed places | group: the group of each collective is mesh["host"],
    mesh["local"].get_group(), mesh["host"] => mesh["host"].get_group(), mesh["local"]
  ✗ must divide | runs: ranks, shape (
    -(-size // n) => size // n
  ✗ no all-gather | value: `tensor` is
    dist.all_gather(list(parts), mine, group=local) => parts[dist.get_rank(local)] = mine
bytes_out_of_hosts
  ✗ half | value: 40): the result is {'a': 30, 'b': 30}, should be {'a': 60, 'b': 60}
    2 * (n - 1) => (n - 1)
  ✗ inside counted | value: 40): the result is {'a': 120, 'b': 120}, should be
    host_of[rank] != host_of[successor] => rank != successor
  ✗ all ranks, also those that are not in the ring | value: 40): the result is {'a': 64, 'b': 64}, should be
    len(ring) => len(host_of)
  ✗ an open ring | value: the result is {'a': 60, 'b': 0}, should be
    ring[1:] + ring[:1], strict=True => ring[1:]
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
  ✗ the new batch size | value: your step 1 is one of n × per_rank = 6 items, not of ranks × per_rank
    saved["ranks"] * saved => n * saved
  ✗ the same order in each epoch | value: your step 4 is the run's step 0, should be the run's step 4
    order(epoch) => order(0)
  ✗ the remainder is left out | value: your step 4 is the run's step 5, should be the run's step 4
    -(-saved["items"] // batch) => saved["items"] // batch
  ✗ blocks | value: the part of rank 0 of 4 is [[
    items[rank::n] => items[rank * len(items) // n : (rank + 1) * len(items) // n]
saving_interval
  ✗ a host's failures | value: saving_interval(60, 0, 1, 24): the result is
    / hosts =>
  ✗ no root | value: saving_interval(60, 0, 1, 1): the result is
    sqrt( => (
  ✗ days for seconds | value: saving_interval(60, 0, 1, 1): the result is
    * 24 * 3600 =>
faulty_host
  ✗ 127.0.1.1 always | value: recording job_5
    if "Unable => if "127.0.1.1" in log: return host, "name" ⏎ if "Unable
  ✗ who timed out | value: recording job_
    f"trying to connect to ({own_address}," => "timed out"
  ✗ the first host | value: recording job_1
    return list(logs)[0], "interface"
  ✓ by the endpoint
    f"trying to connect to ({own_address}," => f"127.0.1.1       {host}" in log and f"endpoint {own_address}:"
which_ranks
  ✗ along the first dimension first | value: 'tp': 2}, 'dp'): the result
    [names.index(dim) + 1 :] => [: names.index(dim)]
  ✗ its own size counts, too | value: 'tp': 2}, 'dp'): the result
    index(dim) + 1 : => index(dim) :
  ✗ always neighbours | value: 'tp': 2}, 'dp'): the result
    rank // apart => rank
mesh_norm
  ✗ what is not cut counts tp times | value: some are whole: the result
    / tp =>
  ✗ the sum of the ranks' norms | value: slices alone: the result
    dist.all_reduce(total) => total.sqrt_() ⏎ dist.all_reduce(total)
    total.sqrt() => total
  ✗ this rank's norm | value: slices alone: the result
    dist.all_reduce(total) =>
best_order
  ✗ the most bytes come first | value: the result is ['tp', 'dp', 'pp'], should be ['pp', 'dp', 'tp']
    min(permutations => max(permutations
  ✗ the one that sends most is last, whatever its size | value: should be ['tp', 'dp', 'pp']
    min(permutations(mesh), key=leaving) => sorted(mesh, key=sent.get)
  ✗ the last sends nothing to the first | value: the result is ['dp', 'tp', 'pp'], should be ['pp', 'tp', 'dp']
    zip(group, group[1:] + group[:1], strict=True) => zip(group, group[1:])
  ✗ no order | value: the result is 'tp' (str), should be
    list(min(permutations(mesh), key=leaving)) => max(sent)
with_sums
  ✗ f comes behind | value: a weight: the result
    types, mended = dict(types), [] => types, mended, late = dict(types), [], []
    mended.append((f" => late.append((f"
    *inputs)) => *inputs)) ⏎ mended += late ⏎ late = []
  ✗ the old name is kept | value: a weight: the result
    inputs[i] = f"f({name})" => pass
  ✗ an f for each use | value: used as R, I, R: the result has 5 entries, should have 4
    if f"f({name})" not in types: => if True:
  ✗ an f for V, too | value: a weight: the result
    == "IR" => in ("IR", "VR")
  ✗ an f for R, too | value: an f is there: the result
    == "IR" => in ("IR", "RR")
outer_step
  ✗ uphill | value: the mean of the ranks: `params`[0]
    (last - mine) => (mine - last)
  ✗ momentum without Nesterov | value: with momentum: `params`[0]
    gradient + momentum * speed => speed
  ✗ agreed stays behind | value: the mean of the ranks: `agreed`[0]
    last.sub_( => mine.copy_(last -
    mine.copy_(last) =>
  ✗ the velocities are averaged, too | cost: budget
    last.sub_ => dist.all_reduce(speed.div_(dist.get_world_size())) ⏎ last.sub_
send_largest
  ✗ without feedback | value: 2 of 6: `gradient`
    residual += gradient => residual.copy_(gradient)
    residual[places] = 0 => residual.zero_()
  ✗ the sum | value: 2 of 6: `gradient`
    all_values / n => all_values
  ✗ two ranks at one place: one is lost | value: `gradient` is [
    .index_add_(0, all_places, all_values / n) => [all_places] = all_values / n
  ✗ an all-reduce of everything | cost: budget
    dist.all_gather(list(all_values.split(k)), values) =>
    dist.all_gather(list(all_places.split(k)), places) =>
    .index_add_(0, all_places, all_values / n) => [places] = values / n ⏎ dist.all_reduce(gradient)
steps_between
  ✗ half of the ring | value: 3.0): the result is 54, should be 107
    2 * (n - 1) => n - 1
  ✗ one latency | value: 0.11): the result is 1, should be 23
    rounds * latency => latency
  ✗ rounded down | value: the result is
    ceil(seconds / compute) => int(seconds / compute)
"""
