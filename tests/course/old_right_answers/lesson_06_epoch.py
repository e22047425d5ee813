"""Unusual right answers of lesson 06, epoch: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "train_epoch": [
        """
        windows = [batches[start : start + n] for start in range(0, len(batches), n)]
        for window in windows:
            optimizer.zero_grad()
            for inputs, targets in window[:-1]:
                with model.no_sync():
                    (mse_loss(model(inputs), targets) / len(window)).backward()
            inputs, targets = window[-1]
            (mse_loss(model(inputs), targets) / len(window)).backward()
            model.sync_gradients()
            optimizer.step()
        optimizer.zero_grad()
        """,
        # never touches the flag, slices, one sync after each window, clears with model.zero_grad(), after an error too
        """
        from torch.nn.functional import mse_loss

        def micro(x, y, share):
            mse_loss(model(x), y).mul(share).backward()

        try:
            for start in range(0, len(batches), n):
                window = batches[start : start + n]
                for x, y in window:
                    micro(x, y, 1 / len(window))
                model.sync_gradients()
                optimizer.step()
                model.zero_grad()
        except BaseException:
            optimizer.zero_grad()
            raise
        """,
        # all but a window's last in one no_sync block; backward gets a gradient, in place of a division
        """
        from torch.nn.functional import mse_loss
        import itertools

        def micro(x, y, size):
            loss = mse_loss(model(x), y)
            loss.backward(torch.full_like(loss, 1 / size))
            model.sync_gradients()

        rest = iter(batches)
        while window := list(itertools.islice(rest, n)):
            with model.no_sync():
                for x, y in window[:-1]:
                    micro(x, y, len(window))
            micro(*window[-1], len(window))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        """,
        # flags with try and finally; undivided losses, gradients divided after the sync
        """
        from torch.nn.functional import mse_loss

        try:
            for start in range(0, len(batches), n):
                window = batches[start:start + n]
                model.disable_grad_sync()
                for x, y in window:
                    mse_loss(model(x), y).backward()
                model.enable_grad_sync()
                model.sync_gradients()
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.div_(len(window))
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        finally:
            model.enable_grad_sync()
        """,
        # windows by itertools, backward with a gradient argument
        """
        from torch.nn.functional import mse_loss
        import itertools

        it = iter(batches)
        while window := list(itertools.islice(it, n)):
            for i, (x, y) in enumerate(window, 1):
                loss = mse_loss(model(x), y)
                loss.backward(torch.full_like(loss, 1 / len(window)))
                del loss
                if i == len(window):
                    model.sync_gradients()
                    optimizer.step()
                    model.zero_grad()
        """,
    ],
}
