"""Wrong answers to the exercises of lesson 06."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "no_sync": (
        WrongAnswer(
            "never switches back",
            "restored",
            "a block: do_sync after the block is False, should be True",
            body="""
            model.disable_grad_sync()
            yield
            """,
        ),
        WrongAnswer(
            "does not expect an exception",
            "restored",
            "an exception in the block: do_sync after the block is False, should be True",
            body="""
            before = model.do_sync
            model.disable_grad_sync()
            yield
            model.do_sync = before
            """,
        ),
        WrongAnswer(
            "switches on, whatever was before",
            "restored",
            "a block: do_sync after a block inside another is True, should be False",
            {"model.do_sync = before": "model.enable_grad_sync()"},
        ),
        WrongAnswer(
            "keeps the exception to itself",
            "exception",
            "an exception: what reaches the caller is nothing, should be ValueError",
            {"finally:\n": "except Exception:\n            pass\n        finally:\n"},
        ),
        WrongAnswer(
            "switches off after the caller's lines",
            "value",
            "a block: do_sync in the block is True, should be False",
            {"        model.disable_grad_sync()\n": "", "yield": "yield\n            model.disable_grad_sync()"},
        ),
        WrongAnswer(
            "restores after an Exception only, not after Stop",
            "restored",
            "Stop in the block: do_sync after the block is False, should be True",
            body="""
            before = model.do_sync
            model.disable_grad_sync()
            try:
                yield
            except Exception:
                if before: model.enable_grad_sync()
                raise
            if before: model.enable_grad_sync()
            """,
        ),
    ),
    "train_epoch": (
        WrongAnswer(
            "the remainder waits for the next epoch",
            "value",
            "7 micro-batches in windows of 4: the number of steps is 1, should be 2",
            {" or i + 1 == len(batches)": ""},
        ),
        WrongAnswer(
            "divides by n in the shorter window too",
            "value",
            "7 micro-batches in windows of 4: the weight after step 1 is",
            {"/ window": "/ n"},
        ),
        WrongAnswer(
            "does not divide", "value", "8 micro-batches in windows of 4: the weight after step 0 is", {" / window": ""}
        ),
        WrongAnswer(
            "off by one: the first window has one micro-batch",
            "value",
            "8 micro-batches in windows of 4: the number of steps is 3, should be 2",
            {"(i + 1) % n": "i % n"},
        ),
        WrongAnswer(
            "talks after each micro-batch: right, and n times as much",
            "cost",
            "ranks, 8 micro-batches in windows of 4: rank 0 calls all_reduce 16 times, budget 4",
            {"contextlib.nullcontext() if last else model.no_sync()": "contextlib.nullcontext()"},
        ),
        WrongAnswer(
            "one forward for the whole window",
            "passes",
            "8 micro-batches in windows of 4: the number of forward passes is 2, should be 8",
            body="""
            for i in range(0, len(batches), n):
                w = batches[i:i+n]
                loss = mse_loss(model(torch.cat([a for a, b in w])), torch.cat([b for a, b in w]))
                loss.backward(); model.sync_gradients()
                optimizer.step(); optimizer.zero_grad()
            """,
        ),
        WrongAnswer(
            "never leaves no_sync",
            "value",
            "8 micro-batches in windows of 4: the weight after step 0 is [-",
            {"contextlib.nullcontext() if last else model.no_sync()": "model.no_sync()"},
        ),
        WrongAnswer(
            "one backward for the whole window",
            "passes",
            "8 micro-batches in windows of 4: the number of backward passes is 2, should be 8",
            body="""
            for i in range(0, len(batches), n):
                window = batches[i : i + n]
                loss = sum(mse_loss(model(inputs), targets) for inputs, targets in window) / len(window)
                loss.backward()
                model.sync_gradients()
                optimizer.step()
                optimizer.zero_grad()
            """,
        ),
    ),
}
