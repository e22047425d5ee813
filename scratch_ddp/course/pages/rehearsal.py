"""One rank of many, alone: torch's fake process group answers at once, and fake tensors have shapes but no memory.

`rehearse` tells what ranks of `torchs_own` would hold and send in a step. Nothing is computed.
"""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scratch_ddp.course.pages.torchs_own import assemble, step
from scratch_ddp.instruments.traffic import Counted, traffic


def rehearse(rank: int, **settings: Any) -> dict[str, Any]:
    """Rehearse a step of this rank in a process of its own; settings are those of `one_rank`."""
    command = [sys.executable, "-W", "ignore", "-m", __name__, json.dumps(settings), str(rank)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def one_rank(rank: int, mesh: Mapping[str, int], llama: Mapping[str, int], tokens: int, n_micro: int) -> dict[str, Any]:
    """What a rank of this mesh holds and sends in a step. Needs a process that has had no process group yet.

    mesh: the sizes of dp, pp and tp. llama: those of a LlamaConfig. A micro-batch is a sequence of `tokens`. Weights
    and activations are bfloat16, gradients float32. Returns, in bytes, `held` by purpose, `kept` of one micro-batch's
    forward, and `sent` as in `by_dimension`.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401  the shapes of what collectives return
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    # Before its first step a stage asks its neighbours whether all know the shapes. Here nobody answers, and no option
    # spares the question. So the two private methods that ask are replaced by the answer: they do.
    for vote in ("_warmup_forward_vote", "_warmup_backward_result"):
        setattr(PipelineStage, vote, lambda *_, **__: torch.tensor([1]))
    sizes = tuple(mesh.values())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=sizes[0] * sizes[1] * sizes[2])
    device_mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(mesh))
    with torch.device("meta"):
        whole = LlamaForCausalLM(LlamaConfig(**llama, use_cache=False))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    stage, schedule = assemble(whole, device_mesh, n_micro, 1, tokens, policy)
    with FakeTensorMode(allow_non_fake_inputs=True):
        stage.to_empty(device="cpu")  # as torchtitan does, but here it stays empty
        optimizer = torch.optim.AdamW(stage.parameters())
        ids = torch.empty(n_micro, tokens, dtype=torch.int64)
        with traffic() as counted:
            step(stage, schedule, ids, ids)
        optimizer.step()
        state = [each for entry in optimizer.state.values() for each in entry.values()]
        held = {"master": _bytes(stage.parameters()), "optimizer": _bytes(state)}
        # FSDP scatters the gradients at the last micro-batch: until then they are whole.
        dp = tuple(dist.get_process_group_ranks(device_mesh.get_group("dp")))
        calls = [call for kind, call in counted.events if kind == "start" and call.members == dp]
        held["gradients"] = sum(call.payload for call in calls if call.name == "reduce_scatter")
        hidden = torch.empty(1, tokens // mesh["tp"], whole.config.hidden_size, dtype=torch.bfloat16)
        kept = _kept(stage, ids[:1] if stage.first else hidden)
        held["weights"] = _bytes(stage.parameters())  # whole, after a forward
    return {"held": held, "kept": kept, "sent": by_dimension(counted, device_mesh)}


def _kept(stage: nn.Module, x: torch.Tensor) -> int:
    """Bytes that a forward keeps for its backward, without parameters."""
    found = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stage(x)
    for each in stage.parameters():
        found.pop(each.to_local().untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in found.values())


def by_dimension(counted: Counted, mesh: DeviceMesh) -> dict[str, list[int]]:
    """For each dimension and call the number of calls, and the bytes that this rank sends in them."""
    names = {tuple(dist.get_process_group_ranks(mesh.get_group(name))): name for name in mesh.mesh_dim_names}
    sent = defaultdict(lambda: [0, 0])
    for kind, call in counted.events:
        if kind == "start" and call.name != "recv":
            entry = sent[f"{names[call.members]} {call.name}"]
            entry[0] += 1
            entry[1] += call.sent
    return dict(sent)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(getattr(each, "_local_tensor", each).nbytes for each in tensors)


if __name__ == "__main__":
    print(json.dumps(one_rank(int(sys.argv[2]), **json.loads(sys.argv[1]))))
