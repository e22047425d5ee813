"""Arguments that torch's classes take and these don't: a hint in place of a bare error."""

import inspect
from typing import Any, Self

HINTS = {
    "process_group": "pass it as group",
    "mesh": "pass the mesh, or a dimension of it such as mesh['dp'], as group",
    "device_mesh": "pass the mesh, or a dimension of it such as mesh['dp'], as group",
    "bucket_cap_mb": "BucketedDDP calls it bucket_mb",
    "find_unused_parameters": "leave it out, since unused parameters are found in every step",
    "static_graph": "leave it out, since every step may use other parameters",
    "gradient_as_bucket_view": "leave it out, since gradients are views of the buckets",
    "broadcast_buffers": "leave it out, since buffers that changed take the first rank's values",
    "device_ids": "leave it out, and move the model to its device before it is wrapped",
    "output_device": "leave it out, and move the model to its device before it is wrapped",
    "mp_policy": "pass compute_dtype, torch.bfloat16 for example",
    "mixed_precision": "pass compute_dtype, torch.bfloat16 for example",
    "reshard_after_forward": "FSDP calls it free_after_forward",
    "auto_wrap_policy": "name the modules that are gathered one at a time with units",
    "optimizer_class": "call it optimizer_cls",
}


class HintsAtTorchNames:
    """A class whose constructor raises TypeError with a hint if it gets a keyword of torch's. Comes first in bases."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        for keyword in kwargs:
            if keyword in HINTS and keyword not in inspect.signature(cls.__init__).parameters:
                raise TypeError(f"{cls.__name__} takes no {keyword!r}, which is torch's: {HINTS[keyword]}")
        return super().__new__(cls)
