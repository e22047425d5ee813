"""A training script that misbehaves in three ways. Run it, read what it prints, and mend it:

    torchrun --standalone --nproc-per-node 2 misbehaving.py

Where it hangs, press Ctrl-C; torchrun takes half a minute to end its ranks. Keep the constants, the model and the
optimizer; everything else may change.
"""

import torch
import torch.distributed as dist
from torch import nn

ITEMS, VALIDATION, FEATURES, BATCH, EPOCHS = 256, 64, 8, 16, 3  # BATCH: items of one rank in a step


class TwoExperts(nn.Module):
    """In training one of two experts answers, by chance, as dropout does; otherwise both."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(FEATURES, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 1) for _ in range(2))

    def forward(self, x):
        hidden = torch.tanh(self.inside(x))
        if self.training:
            return self.experts[int(torch.rand(()) < 0.5)](hidden).squeeze(1)
        return sum(expert(hidden) for expert in self.experts).squeeze(1) / 2


def make_data(count, seed):
    """Points in space; those on one side of a curved surface have label 1."""
    inputs = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs[:, 0] + inputs[:, 1] * inputs[:, 2] > 0).float()


def average_gradients(model):
    """Replace each gradient by its mean over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is None:  # of an expert that was not asked
            continue
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train_epoch(model, optimizer, inputs, labels, epoch):
    """Train on all items in a new order. Return the mean loss, and the numbers of the first items."""
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(epoch))
    model.train()
    losses = []
    for chosen in order.split(BATCH):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs[chosen]), labels[chosen])
        loss.backward()
        average_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses), order[:4].tolist()


def evaluate(model, inputs, labels):
    """The share of right predictions. Each rank predicts its part of the items."""
    part = slice(dist.get_rank(), None, dist.get_world_size())
    model.eval()
    with torch.no_grad():
        right = ((model(inputs[part]) > 0) == (labels[part] > 0)).sum()
    dist.all_reduce(right)
    return right.item() / len(labels)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = TwoExperts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    torch.manual_seed(1 + rank)  # chance must differ between the ranks
    train_data, validation_data = make_data(ITEMS, seed=2), make_data(VALIDATION, seed=3)
    for epoch in range(EPOCHS):
        loss, first = train_epoch(model, optimizer, *train_data, epoch)
        norm = nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()])
        print(
            f"rank {rank}, epoch {epoch}: loss {loss:.4f}, first items {first}, norm of weights {norm:.6f}", flush=True
        )
        if rank == 0:
            print(f"accuracy {evaluate(model, *validation_data):.3f}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
