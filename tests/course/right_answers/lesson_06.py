"""Other right answers to the exercises of lesson 06."""

RIGHT_ANSWERS = {
    "no_sync": [
        # a class with __enter__ and __exit__
        """
        class no_sync:
            def __init__(self, model):
                self.model = model

            def __enter__(self):
                self.before = self.model.do_sync
                self.model.disable_grad_sync()
                return self.model

            def __exit__(self, kind, error, where):
                self.model.do_sync = self.before
                return False
        """,
    ],
    "train_epoch": [
        # never touches the flag: slices, and one sync after each window
        """
        for start in range(0, len(batches), n):
            window = batches[start : start + n]
            for x, y in window:
                mse_loss(model(x), y).mul(1 / len(window)).backward()
            model.sync_gradients()
            optimizer.step()
            model.zero_grad()
        """,
    ],
}
