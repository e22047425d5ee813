"""Unusual right answers of lesson 10, fsdp: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "shard_unit": [
        # into_tensor
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // n)
        padding = n * part - sum(sizes)

        def flatten(tensors):
            return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

        whole = flatten(parameters)
        shard = nn.Parameter(whole.view(n, part)[rank].clone())
        for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
            parameter.data = view.view_as(parameter)

        def gather():
            whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
            dist.all_gather_into_tensor(whole, shard.detach())

        def free():
            whole.untyped_storage().resize_(0)

        def reduce():
            free()
            gradients = flatten(parameter.grad for parameter in parameters) / n
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_tensor(shard.grad, gradients)
            for parameter in parameters:
                parameter.grad = None

        free()
        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: free())
        module.register_full_backward_pre_hook(lambda *_: gather())
        module.register_full_backward_hook(lambda *_: reduce())
        return shard
        """,
        # writes gradients into one buffer made anew, frees at end
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // n)
        padding = n * part - sum(sizes)

        def flatten(tensors):
            return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

        whole = flatten(parameters)
        shard = nn.Parameter(whole.view(n, part)[rank].clone())
        for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
            parameter.data = view.view_as(parameter)

        def gather():
            whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
            dist.all_gather(list(whole.split(part)), shard.detach())

        def free():
            whole.untyped_storage().resize_(0)

        def reduce():
            free()
            gradients = shard.new_zeros(n * part)
            torch._foreach_copy_(list(gradients.split([*sizes, padding]))[:-1], [p.grad.flatten() for p in parameters])
            gradients.div_(n)
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter(shard.grad, list(gradients.split(part)))
            for parameter in parameters:
                parameter.grad = None

        free()
        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: free())
        module.register_full_backward_pre_hook(lambda *_: gather())
        module.register_full_backward_hook(lambda *_: reduce())
        return shard
        """,
        # a hook of the output
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // n)
        padding = n * part - sum(sizes)

        def flatten(tensors):
            return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

        whole = flatten(parameters)
        shard = nn.Parameter(whole.view(n, part)[rank].clone())
        for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
            parameter.data = view.view_as(parameter)

        def gather():
            whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
            dist.all_gather(list(whole.split(part)), shard.detach())

        def free():
            whole.untyped_storage().resize_(0)

        def reduce():
            free()
            gradients = flatten(parameter.grad for parameter in parameters) / n
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter(shard.grad, list(gradients.split(part)))
            for parameter in parameters:
                parameter.grad = None

        free()
        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: free())
        def before_backward(module, arguments, out):
            gathered = []

            def gather_once(gradient):
                if not gathered:
                    gathered.append(1)
                    gather()

            for each in [out] if isinstance(out, torch.Tensor) else out:
                if each.requires_grad:
                    each.register_hook(gather_once)

        module.register_forward_hook(before_backward)
        module.register_full_backward_hook(lambda *_: reduce())
        return shard
        """,
        # the flat gradient buffer kept as shard.grad
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // n)
        padding = n * part - sum(sizes)

        def flatten(tensors):
            return nn.functional.pad(torch.cat([each.detach().flatten() for each in tensors]), (0, padding))

        whole = flatten(parameters)
        shard = nn.Parameter(whole.view(n, part)[rank].clone())
        for parameter, view in zip(parameters, whole.split([*sizes, padding]), strict=False):
            parameter.data = view.view_as(parameter)

        def gather():
            whole.untyped_storage().resize_(whole.nbytes)  # the views are valid again
            dist.all_gather(list(whole.split(part)), shard.detach())

        def free():
            whole.untyped_storage().resize_(0)

        def reduce():
            free()
            gradients = flatten(parameter.grad for parameter in parameters) / n
            if shard.grad is None:
                shard.grad = torch.empty_like(shard)
            dist.reduce_scatter(shard.grad, list(gradients.split(part)))
            for parameter in parameters:
                parameter.grad = None

        free()
        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: free())
        module.register_full_backward_pre_hook(lambda *_: gather())
        module.register_full_backward_hook(lambda *_: reduce())
        return shard
        """,
        # the old shard.grad's memory is used again
        """
        rank, n = dist.get_rank(), dist.get_world_size()
        parameters = list(module.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        part = -(-sum(sizes) // n)
        padding = n * part - sum(sizes)

        def flat(tensors):
            return nn.functional.pad(torch.cat([each.reshape(-1) for each in tensors]), (0, padding))

        with torch.no_grad():
            whole = flat([parameter.detach() for parameter in parameters])
        shard = nn.Parameter(whole.view(n, part)[rank].clone())
        for parameter, piece in zip(parameters, whole.split([*sizes, padding])):
            parameter.data = piece.view(parameter.shape)
        size = whole.nbytes

        def gather():
            whole.untyped_storage().resize_(size)
            dist.all_gather(list(whole.split(part)), shard.detach())

        def free():
            whole.untyped_storage().resize_(0)

        def reduce():
            free()
            gradients = flat([parameter.grad for parameter in parameters]) / n
            for parameter in parameters:
                parameter.grad = None
            if shard.grad is None:
                shard.grad = torch.zeros_like(shard)
            dist.reduce_scatter(shard.grad, list(gradients.split(part)))

        module.register_forward_pre_hook(lambda *_: gather())
        module.register_forward_hook(lambda *_: free())
        module.register_full_backward_pre_hook(lambda *_: gather())
        module.register_full_backward_hook(lambda *_: reduce())
        free()
        return shard
        """,
    ],
}
