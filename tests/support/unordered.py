"""Operations that add in no fixed order on CUDA, so that a run does not repeat to the bit, found while they run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# those that torch.use_deterministic_algorithms(True) refuses, or for which it takes another kernel
REFUSED = {
    "grid_sampler_2d_backward", "histc", "kthvalue", "median.dim", "nll_loss2d_forward", "put_", "scatter_reduce",
    "upsample_bilinear2d_backward", "upsample_linear1d_backward",
}  # fmt: skip
REPLACED = {"index_add", "index_add_", "scatter_add", "scatter_add_"}
ATTENTION = ("_scaled_dot_product_flash", "_scaled_dot_product_efficient", "_scaled_dot_product_cudnn")


class Unordered(TorchDispatchMode):
    """Notes such operations of tensors on cards in `found`: `with Unordered() as seen: ...`, of backward passes too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.operations: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, x = func.__name__.removesuffix(".default"), args[0] if args else None
        on_card = getattr(getattr(x, "device", None), "type", "cpu") == "pretend"
        if on_card:
            self.operations.add(name)
            base = name.partition(".")[0]
            sums_floats = base in ("cumsum", "cumsum_", "cumprod") and x.is_floating_point()
            collides = base in REPLACED and args[2].shape[args[1]] > 1  # one index a row meets no other
            backward = base.startswith(ATTENTION) and base.endswith("_backward")
            if name in REFUSED or base in REFUSED or sums_floats or collides or backward:
                self.found.add(name)
        return func(*args, **(kwargs or {}))
