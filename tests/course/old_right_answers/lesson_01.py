"""Unusual right answers of lesson 01: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "all_reduce_in_two_steps": [
        """
        total = tensor.clone()
        dist.reduce(total, dst=root)
        dist.broadcast(total, src=root)
        tensor.copy_(total)
        """,
        # nothing for one rank, on a view
        """
        if dist.get_world_size() == 1:
            return
        tensor = tensor.view(-1)
        dist.reduce(tensor, dst=root, group=dist.group.WORLD)
        dist.broadcast(tensor, root)
        """,
        # through a copy
        """
        import os
        import sys
        import math
        from torch import Tensor

        total = tensor.detach().clone()
        works = dist.reduce(total, dst=root, async_op=True)
        works.wait()
        dist.broadcast(total, src=root)
        tensor.copy_(total)
        """,
        # flat, waited for, returns it
        """
        import os
        import sys
        import math
        from torch import Tensor

        flat = tensor.view(-1)
        dist.reduce(flat, group_dst=root, op=dist.ReduceOp.SUM)
        if not flat.numel():
            pass
        work = dist.broadcast(flat, group_src=root, async_op=True)
        work.wait()
        return tensor
        """,
        # the reduce on a copy of the tensor, the broadcast in place
        """
        part = tensor.clone()
        dist.reduce(part, root, op=dist.ReduceOp.SUM)
        if dist.get_rank() == root:
            tensor.copy_(part)
        del part
        dist.broadcast(tensor, root)
        return tensor
        """,
    ],
    "all_gather_uneven": [
        {"tensor.new_zeros(longest)": "tensor.new_full((longest,), float('nan'))"},
        {"for rank in range(world_size)]\n": "for rank in range(dist.get_world_size())]\n"},
        # rows of one matrix, bits as int32
        """
        world_size = dist.get_world_size()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(lengths, torch.tensor([len(tensor)]))
        lengths = [length.item() for length in lengths]
        longest = max(lengths)
        padded = torch.zeros(longest, dtype=torch.int32)
        padded[: len(tensor)] = tensor.view(torch.int32)
        rows = torch.empty(world_size, longest, dtype=torch.int32)
        dist.all_gather(list(rows), padded)
        return [row[:length].view(torch.float32) for row, length in zip(rows, lengths)]
        """,
        # into one tensor
        """
        world_size = dist.get_world_size()
        # Nobody knows the others' lengths yet.
        lengths = [torch.empty(1, dtype=torch.int64, device=tensor.device) for _ in range(world_size)]
        dist.all_gather(lengths, torch.tensor([len(tensor)], device=tensor.device))
        longest = int(max(lengths))
        padded = tensor.new_zeros(longest)
        padded[: len(tensor)] = tensor
        pieces = [tensor.new_empty(longest) for _ in range(world_size)]
        whole = tensor.new_empty(world_size * longest)
        dist.all_gather_into_tensor(whole, padded)
        pieces = list(whole.view(world_size, longest)) if longest else [whole] * world_size
        pieces = [pieces[rank][: int(lengths[rank])] for rank in range(world_size)]
        return pieces
        """,
        # one when all are empty, own piece not copied, waited for
        """
        import os
        import sys
        import math
        from torch import Tensor

        world_size = dist.get_world_size()
        lengths = [torch.empty((), dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(lengths, torch.tensor(len(tensor)), async_op=True).wait()
        longest = max(lengths).item()
        if longest == 0:
            return [torch.empty(0, dtype=torch.float32) for _ in lengths]
        padded = torch.nn.functional.pad(tensor, (0, longest - len(tensor)), value=7.0).contiguous()
        pieces = [torch.empty(longest, dtype=torch.float32) for _ in lengths]
        dist.all_gather(pieces, padded)
        pieces = [piece.narrow(0, 0, length.item()).clone() for piece, length in zip(pieces, lengths)]
        pieces[dist.get_rank()] = tensor
        return pieces
        """,
    ],
}
