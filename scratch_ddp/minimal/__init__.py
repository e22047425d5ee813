"""Data parallelism in a form to read: each idea complete in one file, with nothing but torch.

    ddp    four ways to average gradients: naive, flat, overlapped, bucketed
    zero   optimizer state, and then gradients too, shared out over the ranks (ZeRO-1 and -2)
    fsdp   parameters too (ZeRO-3)

These are the classes that the lessons build. They are right for a well-behaved model, and each file says what it
leaves out. The classes of the same names in `scratch_ddp.ddp`, `.zero` and `.fsdp` do all of that; neither imports
the other, and a test checks that both give the same gradients.
"""
