"""A pretended GPU: tensors on the device "pretend:0" that are computed on the CPU, for tests on machines without a GPU.

    with pretended() as gpu:
        nearplane.quantize(model, out, device="pretend:0", ...)
    assert gpu.total.synchronizations <= 12

As on CUDA, an operation on tensors of two devices raises, and so does `numpy()` of a tensor on the device. Whatever
makes a GPU wait is counted by function of the package (`traffic`), and the bytes of tensors by card (`live`, `peak`).
What one stream writes must not be read in another that does not wait for it. Not shown are wrong or missing kernels,
CUDA's order of sums, and pinned buffers that are written or read before a copy has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._device import _device_constructors

import pretended_cards
from pretended_cards import KIND, Card, Gpu, Runtime, card_of, here, present
from traffic import Traffic

CPU = torch.device("cpu")
aten = torch.ops.aten

# operations that wait for a value of the device, or for the size of a result that depends on values
READING = {
    "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "_local_scalar_dense", "_unique2", "allclose", "bincount",
    "cholesky_inverse", "equal", "histc", "masked_select", "multinomial", "nonzero", "unique_consecutive", "unique_dim",
    "unique_dim_consecutive",
}  # fmt: skip
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPYING = {"copy_", "_to_copy"}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
NO_LAUNCH |= {"_local_scalar_dense", "equal"} | COPYING


class Pretend(Tensor):
    """A tensor that says it lies on a card, around the CPU tensor `held` that holds its values."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, index: int, requires_grad: bool = False) -> Pretend:
        card_of(index).hold(held)
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=torch.device(KIND, index),
            requires_grad=requires_grad,
        )
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, *args, **(kwargs or {}))

    def become(self, held: Tensor) -> None:
        """Hold another CPU tensor, of any shape."""
        Tensor.data.__set__(self, Pretend(held, self.device.index))
        self.held = held

    @property
    def data(self) -> Pretend:
        return Pretend(self.held, self.device.index)

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Pretend):
            raise RuntimeError("Attempted to call `variable.set_data(tensor)`, but they have incompatible tensor type.")
        self.become(value.held)

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory that is freed is not used again."""

    def tolist(self) -> Any:
        here().synchronizations += 1
        return self.held.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Pretend:
        copied = Pretend(self.held.clone(), self.device.index, self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the CPU tensor that `torch.load(..., map_location="cpu")` makes of it."""
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **kwargs: Any) -> str:
        return f"Pretend({self.held!r}, {self.device})"


@dataclass(frozen=True)
class Operation:
    """What the schema of an operation says.

    Args:
        name: Its name without namespace and overload.
        launches: Whether it computes something on a device.
        view: Whether its results are views.
        composite: Whether it is made of other operations.
        written: Position and name of each argument that it writes to.
        results: For each result the number in `written` of the argument that it is, or None.
    """

    name: str
    launches: bool
    view: bool
    composite: bool
    written: tuple[tuple[int, str], ...]
    results: tuple[int | None, ...]


@cache
def operation(func: Any) -> Operation:
    """Read the schema of an operation."""
    name, arguments = func._schema.name.split("::")[1], func._schema.arguments
    marks = [argument.alias_info for argument in arguments]
    written = [at for at, mark in enumerate(marks) if mark is not None and mark.is_write]
    sets = [marks[at].before_set for at in written]
    marks_out = [result.alias_info for result in func._schema.returns]
    view = any(mark is not None and not mark.is_write for mark in marks)
    return Operation(
        name=name,
        launches=not view and torch.Tag.inplace_view not in func.tags and name not in NO_LAUNCH,
        view=view,
        composite=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        written=tuple((at, arguments[at].name) for at in written),
        results=tuple(sets.index(mark.before_set) if mark and mark.is_write else None for mark in marks_out),
    )


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute an operation that has tensors on cards, or makes them, on the CPU, and count it.

    Raises:
        RuntimeError: Its tensors, or the generator, are on two devices where CUDA does not allow that.
    """
    what = operation(func)
    if what.name == "scaled_dot_product_attention":
        return attention(*args, **kwargs)
    if what.composite:  # in inference mode torch does not take it apart before
        return func.decompose(*args, **kwargs)
    written = [args[at] if at < len(args) else kwargs[name] for at, name in what.written]
    target = kwargs.get("device") or device_of(what, args, kwargs)
    refuse_mixed(what, args, kwargs, written, target)
    count(what, args, kwargs, target)
    inner = {name: inside(value) for name, value in kwargs.items()}
    if is_pretended(inner.get("device")):
        inner["device"] = CPU
    if func is aten.mm.dtype:  # CUDA's tensor cores have it: products of 16-bit numbers with sums in float32
        a, b, dtype = map(inside, (*args, *inner.values()))
        results = a.to(dtype) @ b.to(dtype)
    else:
        results = func(*map(inside, args), **inner)
    if present().streams.several:
        order(what, (*args, *kwargs.values()), written or ([] if what.view else [results]), target)
    for changed in tensors_in(written):
        if isinstance(changed, Pretend) and layout_of(changed) != layout_of(changed.held):
            changed.become(changed.held)
    if what.name == "_to_copy" and target.type == "cpu" and kwargs.get("non_blocking"):
        present().pin(results)  # so does torch
    if not what.written:
        if what.view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            with torch.inference_mode(False):  # a view is what its base is
                return outside(results, target)
        return outside(results, target)
    if len(what.results) == 1:
        return written[what.results[0]] if what.results[0] is not None else outside(results, target)
    pairs = zip(what.results, results or (), strict=True)
    return tuple(outside(result, target) if at is None else written[at] for at, result in pairs) or None


def device_of(what: Operation, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device of the results: that of the tensor that a copy writes, or of the first on a card."""
    if what.name == "copy_":
        return args[0].device
    return next(each.device for each in tensors_in((*args, *kwargs.values())) if isinstance(each, Pretend))


def refuse_mixed(
    what: Operation, args: Sequence[Any], kwargs: dict[str, Any], written: Sequence[Any], target: torch.device
) -> None:
    """Refuse what CUDA refuses: two devices, except in copies and for single numbers and indices on the CPU.

    Raises:
        RuntimeError: There are two.
    """
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != target.type:
        raise RuntimeError(f"Expected a '{target.type}' device type for generator but found '{generator.device.type}'")
    if what.name in COPYING:
        return
    if what.name in INDEXING and is_pretended(args[0].device):
        args = [args[0], *(index for index in tensors_in(args[1]) if index.device != CPU), *args[2:]]
    given = [each for each in tensors_in((*args, *kwargs.values())) if each.dim() or each.device != CPU]
    devices = {each.device for each in (*given, *tensors_in(written))}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {found}! "
            f"({what.name} in {present().places.place()})"
        )


def count(what: Operation, args: Sequence[Any], kwargs: dict[str, Any], target: torch.device) -> None:
    """Count an operation for the function of the package that asks for it."""
    now = here()
    now.launches += what.launches
    if what.name == "copy_":
        count_copy(now, args[1], args[0], len(args) > 2 and args[2])
    elif what.name == "_to_copy":
        count_copy(now, args[0], target, kwargs.get("non_blocking", False), kwargs.get("dtype"))
    elif what.name in INDEXING:
        indices = list(tensors_in(args[1]))
        chosen = any(each.device != CPU and each.dtype in (torch.bool, torch.uint8) for each in indices)
        filled = len(args) > 2 and args[2].numel() == 1 and len(args[1]) == 1  # torch fills by the mask
        now.synchronizations += chosen and not filled
        for each in indices:
            if each.device == CPU:
                count_copy(now, each, target, False)
    elif what.name == "repeat_interleave":
        now.synchronizations += kwargs.get("output_size") is None
    else:
        now.synchronizations += what.name in READING or bool(kwargs.get("check_errors"))


def count_copy(
    now: Traffic,
    source: Tensor,
    goal: Tensor | torch.device,
    non_blocking: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Count a copy between the CPU and a card; one that stays on a card is a launch.

    Args:
        goal: The tensor that is written, or only its device, as a new tensor is made.
        dtype: Of the new tensor. A tensor is converted before it is sent.
    """
    place = goal.device if isinstance(goal, Tensor) else goal
    dtype = goal.dtype if isinstance(goal, Tensor) else dtype or source.dtype
    size = source.numel() * dtype.itemsize
    if is_pretended(source.device) and is_pretended(place):
        now.launches += 1
    elif is_pretended(place) and source.device == CPU:
        now.to_device += 1
        now.to_device_bytes += size
        now.waiting += not (non_blocking and present().is_pinned(source))
    elif is_pretended(source.device) and place == CPU:
        now.to_host += 1
        now.to_host_bytes += size
        now.waiting += not (non_blocking and (not isinstance(goal, Tensor) or present().is_pinned(goal)))


def order(what: Operation, given: Sequence[Any], made: Sequence[Any], target: torch.device) -> None:
    """Check that an operation reads nothing that another stream writes, and note what it writes.

    Raises:
        RuntimeError: It reads such a thing.
    """
    read = [each for each in tensors_in(given) if isinstance(each, Pretend)]
    wrote = [each for each in tensors_in(made) if is_pretended(target)]
    card = read[0].device.index if read else target.index or 0
    storages = [[each.untyped_storage() for each in tensors] for tensors in (read, wrote)]
    present().streams.order(what.name, card, *storages)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the kernel that the CPU takes, so that its values are the same to the last bit."""
    given = (query, key, value, attn_mask, dropout_p, is_causal)
    chosen = aten._fused_sdp_choice(*map(inside, given), scale=scale, enable_gqa=enable_gqa)
    if chosen != torch.nn.attention.SDPBackend.FLASH_ATTENTION.value:
        return aten._scaled_dot_product_attention_math(*given, scale=scale, enable_gqa=enable_gqa)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Walk through the tensors among arguments and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def inside(value: Any) -> Any:
    """Return the CPU tensors that tensors on cards stand for."""
    if isinstance(value, (list, tuple)):
        return [inside(each) for each in value]
    return value.held if isinstance(value, Pretend) else value


def outside(value: Any, target: torch.device) -> Any:
    """Return CPU tensors as tensors on a card, if that is the target."""
    if isinstance(value, (list, tuple)):
        return type(value)(outside(each, target) for each in value)
    return Pretend(value, target.index or 0) if isinstance(value, Tensor) and is_pretended(target) else value


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what `_make_wrapper_subclass` copied from the tensor inside."""
    return tensor.size(), tensor.stride(), tensor.storage_offset()


def is_pretended(device: torch.device | None) -> bool:
    """Return whether a device is a card."""
    return device is not None and device.type == KIND


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Tell torch once in a process that there is such a device. Nothing changes for others.

    Raises:
        AttributeError: This torch has no such hook: the pretended device must be made in another way for it.
    """

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return pretended_cards.GPU is not None

        def has_primary_context(self, index: int) -> bool:
            return pretended_cards.GPU is not None

        def is_built(self) -> bool:
            return True

    torch.ones(
        1, requires_grad=True
    ).backward()  # torch starts threads for all devices that it knows now; they forbid forks
    backend_registration._setup_privateuseone_for_python_backend(KIND, backend_module=Runtime(), hook=Hook())
    made, attended = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    made.fallback(compute, "PrivateUse1")  # tensors that are made on the device
    for name in ("arange", "eye", "linspace", "logspace", "randperm"):  # torch makes them empty, and then resizes them
        operations = [getattr(getattr(aten, name), overload) for overload in getattr(aten, name).overloads()]
        for each in operations:
            if "device" in [argument.name for argument in each._schema.arguments]:
                attended.impl(each, partial(compute, each), "PrivateUse1")
    attended.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")
    return made, attended


@contextmanager
def pretended(memory: int = 80 << 30, cards: int = 1) -> Iterator[Gpu]:
    """Let this process have pretended GPUs inside: "pretend:0", "pretend:1".

    Args:
        memory: Bytes of each.
        cards: How many.
    """
    if pretended_cards.GPU is not None:
        raise RuntimeError("A pretended GPU is open already.")
    register()
    _device_constructors()  # torch remembers the functions that it finds at the first call, not those that replace them
    gpu = Gpu(tuple(Card(index, memory) for index in range(cards)))
    empty, lifted = torch.empty, torch._C._only_lift_cpu_tensors()

    def empty_or_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return gpu.pin(made) if pin_memory else made

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        if tensor.device != CPU:
            raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")
        return tensor if gpu.is_pinned(tensor) else gpu.pin(tensor.clone())

    pretended_cards.GPU = gpu
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) copies from the CPU where it can be seen
    try:
        with (
            torch.autograd.set_multithreading_enabled(False),  # backward passes in the thread that asks for them
            mock.patch.object(torch, "empty", empty_or_pinned),
            mock.patch.object(Tensor, "pin_memory", pin_memory),
            mock.patch.object(Tensor, "is_pinned", lambda tensor, device=None: gpu.is_pinned(tensor)),
        ):
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
        pretended_cards.GPU = None
