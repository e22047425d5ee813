"""Unusual right answers of lesson 06: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "no_sync": [
        """
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, model, "do_sync", model.do_sync)
            model.do_sync = False
            yield
        """,
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
        # returns another context manager
        """
        from unittest import mock

        def no_sync(model):
            return mock.patch.object(model, "do_sync", False)
        """,
        # the block is a function inside, and yields the model
        """
        import contextlib

        def no_sync(model):
            @contextlib.contextmanager
            def block():
                before = model.do_sync
                model.disable_grad_sync()
                try:
                    yield model
                finally:
                    model.do_sync = before

            return block()
        """,
        # switches back by the method that fits
        """
        before = model.do_sync
        model.disable_grad_sync()
        try:
            yield
        finally:
            (model.enable_grad_sync if before else model.disable_grad_sync)()
        """,
    ],
}
