"""Mapping from the tensors of a model's files to the parameters of its network, by transformers' own renaming rules.

Only this file and `expert_names.py` use transformers' loading internals: the conversion of keys, and the initialisation
of buffers that are not stored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, core_model_loading
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.initialization import guard_torch_init_functions

from nearplane.errors import ModelError, NumericalError
from nearplane.system.safetensors_files import TensorReader


@dataclass(frozen=True, slots=True)
class Load:
    """Source of parameters in the files: one tensor unchanged, or several tensors converted (fused experts)."""

    targets: list[str]
    sources: list[tuple[str, str]] = field(default_factory=list)  # (name in the files, pattern that matched)
    converter: core_model_loading.WeightConverter | None = None


class Weights:
    """Reader of the stored weights of a network that is on the meta device.

    Attributes:
        unused: {stored name: name that it would have in the network} of tensors that the network does not use.

    Raises:
        ModelError: The files lack parameters of the network.
    """

    def __init__(self, network: PreTrainedModel, reader: TensorReader) -> None:
        self.network, self.reader = network, reader
        self._aliases = _aliases(network)
        self.conversions = get_model_conversion_mapping(network)
        self._loads, self.unused = _plan(network, reader, self.conversions)
        self._known = {*network.state_dict()}
        names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
        missing = [name for name in names if self.find(name) is None]
        self._computed = {name for name in missing if name in (network._keys_to_ignore_on_save or ())}
        if missing := [name for name in missing if name not in self._computed]:
            raise ModelError(
                f"{reader.folder}: the weight files lack {len(missing)} of the {len(names)} parameters of "
                f"{type(network).__name__}, first {missing[0]}. These files do not belong together. Fetch the folder again."
            )

    def source_name(self, parameter: str) -> str:
        """Return the stored name of a parameter.

        Raises:
            ModelError: The parameter is not stored as a tensor of its own.
        """
        load = self.find(parameter)
        if load is None or load.converter is not None:
            how = "not stored" if load is None else f"made of {len(load.sources)} tensors"
            raise ModelError(f"{parameter} is {how} in {self.reader.folder}, where it has no name of its own.")
        return load.sources[0][0]

    def stored(self, parameter: str) -> Tensor:
        """Read a parameter that is stored as a tensor of its own, as it is stored; see `source_name`."""
        source = self.source_name(parameter)
        return self.reader.read([source])[source]

    def stored_alone(self, parameter: str) -> bool:
        """Return whether a parameter is stored as one tensor of its own."""
        load = self.find(parameter)
        return load is not None and load.converter is None

    def written_name(self, parameter: str) -> str:
        """Return the name of a parameter in the checkpoint of the quantized model.

        This is the stored name, or the name in the network if only a parameter tied to this one is stored.

        Raises:
            ModelError: The parameter is not stored as a tensor of its own.
        """
        stored = self.source_name(parameter)
        return stored if parameter in self._loads else parameter

    def copies(self, parameter: str) -> list[str]:
        """Return the stored names of a parameter and of parameters tied to it, which may be stored as well."""
        names = self._aliases.get(parameter, (parameter,))
        return [name for alias in names if alias in self._loads for name, _ in self._loads[alias].sources]

    def tied(self, parameter: str) -> bool:
        """Return whether the network has a parameter under several names."""
        return parameter in self._aliases

    def merged(self) -> dict[str, list[str]]:
        """Return {parameter: stored names} of all parameters that are converted from one or several tensors."""
        return {name: [source for source, _ in load.sources] for name, load in self._loads.items() if load.converter}

    def lacks(self, name: str) -> bool:
        """Return whether the network has a parameter or buffer of this name that is not stored."""
        return name in self._known and self.find(name) is None

    def names_below(self, prefix: str) -> list[str]:
        """Return the stored names of all tensors of a submodule, whether it uses them or not."""
        loads = {id(load): load for load in self._loads.values() if any(t.startswith(prefix) for t in load.targets)}
        unused = [name for name, target in self.unused.items() if target.startswith(prefix)]
        return [name for load in loads.values() for name, _ in load.sources] + unused

    def fill(
        self,
        root: nn.Module,
        prefix: str,
        device: torch.device,
        dtype: torch.dtype,
        *,
        without: tuple[str, ...] = (),
        loaded: Iterable[tuple[Load, dict[str, Tensor]]] | None = None,
    ) -> None:
        """Load the weights of a copy of a submodule from disk, and compute its buffers.

        Args:
            root: A copy of the submodule `prefix`, on the meta device; changed in place.
            prefix: Name of the submodule in the network with a dot at the end; "" for the whole network.
            device, dtype: Device and dtype of the weights; buffers keep their dtype.
            without: Name prefixes of parameters that stay on the meta device.
            loaded: What `read` gives for this submodule, if it was called before.

        Raises:
            ModelError: A tensor is unreadable or has the wrong shape.
            NumericalError: A tensor is not finite; the message names it.
        """
        empties, finite = self._stored(root, prefix, without), list[tuple[str, Tensor]]()
        for load, tensors in self.read(root, prefix, without=without) if loaded is None else loaded:
            source = load.sources[0][0]
            for target, tensor in tensors.items():
                places = [place for place in self._aliases.get(target, (target,)) if place in empties]
                if not places:
                    continue
                empty = empties[places[0]]
                kept = dtype if isinstance(empty, nn.Parameter) else empty.dtype
                tensor = _converted(tensor.to(device, non_blocking=True), empty, kept, source)
                if tensor.is_floating_point():
                    finite.append((f"{source} contains NaN or Inf in {tensor.dtype}", torch.isfinite(tensor).all()))
                _put(root, [place.removeprefix(prefix) for place in places], tensor)
        if finite and not torch.stack([fine for _, fine in finite]).all():  # a device is waited for once
            fault = next(fault for fault, fine in finite if not fine)
            raise NumericalError(f"{fault}. Fetch the folder again.")
        self._compute(root, prefix, device, dtype)

    def read(
        self, root: nn.Module, prefix: str, *, without: tuple[str, ...] = (), pinned: bool = False
    ) -> Iterator[tuple[Load, dict[str, Tensor]]]:
        """Yield the tensors of a copy of a submodule as they are read from disk: {parameter: tensor} on the CPU, by load.

        Args:
            root, prefix, without: See `fill`; nothing is changed.
            pinned: Whether they lie in memory from which a GPU copies while the CPU goes on.

        Raises:
            ModelError: A tensor is unreadable.
        """
        done: set[str] = set()
        for name in self._stored(root, prefix, without):
            if name in done or name in self._computed:
                continue
            load = self.find(name)
            assert load is not None, name
            done.update(place for target in load.targets for place in self._aliases.get(target, (target,)))
            tensors = self._read(load)
            yield load, {name: each.pin_memory() for name, each in tensors.items()} if pinned else tensors

    def _stored(self, root: nn.Module, prefix: str, without: tuple[str, ...]) -> dict[str, Tensor]:
        """Return {name in the network: empty parameter or buffer} of a copy of a submodule, as far as they are stored."""
        parameters = {prefix + name: p for name, p in root.named_parameters(remove_duplicate=False)}
        buffers = {prefix + name: b for name, b in root.named_buffers() if prefix + name in self._loads}
        return {name: empty for name, empty in (parameters | buffers).items() if not name.startswith(without)}

    @staticmethod
    def leave_out(part: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        """Give a part that must not run NaN weights without memory: if it runs after all, the outputs are NaN."""
        nothing = torch.full((), math.nan, device=device, dtype=dtype)
        for name, empty in [*part.named_parameters()]:
            if empty.is_floating_point():
                _put(part, [name], nothing.expand(empty.shape))

    def find(self, parameter: str) -> Load | None:
        """Return the source of a parameter, or of one tied to it; None if it is not stored."""
        names = (parameter, *self._aliases.get(parameter, ()))
        return next((self._loads[name] for name in names if name in self._loads), None)

    def _read(self, load: Load) -> dict[str, Tensor]:
        """Read and convert the tensors of a load; return {parameter: tensor}."""
        tensors = self.reader.read([name for name, _ in load.sources])
        if load.converter is None:
            return {load.targets[0]: tensors[load.sources[0][0]]}
        converter = deepcopy(load.converter)
        for name, pattern in load.sources:
            converter.add_tensor(load.targets[0], name, pattern, lambda tensor=tensors[name]: tensor)
        converted = converter.convert(load.targets[0], model=self.network, config=self.network.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    @torch.no_grad()
    def _compute(self, root: nn.Module, prefix: str, device: torch.device, dtype: torch.dtype) -> None:
        """Compute tensors that are not stored (rotary frequencies, masks, sine waves) as from_pretrained does."""
        for path, module in root.named_modules():
            place = f"{prefix}{path}." if path else prefix
            empty = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
            waves = [name for name, _ in module.named_parameters(recurse=False) if place + name in self._computed]
            if not empty and not waves:
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor._is_hf_initialized = True  # transformers does not overwrite these
            for name, buffer in empty.items():
                module._buffers[name] = torch.zeros_like(buffer, device=device)
            for name in waves:
                _put(module, [name], torch.zeros_like(module.get_parameter(name), device=device, dtype=dtype))
            with guard_torch_init_functions():
                _owner(self.network, prefix + path)._init_weights(module)


def renamed(network: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return {stored name: name in the network} of stored tensors, by transformers' renaming rules only."""
    rules = [
        entry for entry in get_model_conversion_mapping(network) if isinstance(entry, core_model_loading.WeightRenaming)
    ]
    known = network.state_dict()
    return {
        name: core_model_loading.rename_source_key(name, rules, [], network.base_model_prefix, known)[0]
        for name in names
    }


def as_saved(network: PreTrainedModel, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as which transformers saves parameters, by their names in its files.

    Args:
        network: The network.
        values: Values by name of the parameter.
    """
    saved: dict[str, Tensor] = core_model_loading.revert_weight_conversion(network, dict(values))
    return saved


def _aliases(network: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return all names of each parameter that has more than one (tied embeddings): {name: names}."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {name: tuple(group) for group in names.values() if len(group) > 1 for name in group}


def _plan(
    network: PreTrainedModel, reader: TensorReader, conversions: Sequence[core_model_loading.WeightTransform]
) -> tuple[dict[str, Load], dict[str, str]]:
    """Find the source of every parameter in the files.

    Returns:
        {parameter or buffer: load}, and {stored name: name that it would have} of tensors that the network does not
        use.
    """
    renamings = [entry for entry in conversions if isinstance(entry, core_model_loading.WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, core_model_loading.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    known, base = network.state_dict(), network.base_model_prefix
    loads: dict[str, Load] = {}
    unused: dict[str, str] = {}
    for name in sorted(reader.names(), key=core_model_loading.dot_natural_key):
        target, pattern = core_model_loading.rename_source_key(name, renamings, converters, base, known)
        if target not in known and name in known:
            target, pattern = name, None
        if target not in known:
            unused[name] = target if target.startswith(f"{base}.") else f"{base}.{target}"
        elif pattern is None:
            loads[target] = Load(targets=[target], sources=[(name, name)])
        else:
            converter = by_pattern[pattern]
            first, *others = converter.target_patterns
            load = loads.setdefault(target, Load(targets=[target], converter=converter))
            load.sources.append((name, pattern))
            for other in (target.replace(first, pattern) for pattern in others):
                if other not in loads:
                    load.targets.append(other)
                    loads[other] = load
    return loads, unused


def _converted(tensor: Tensor, empty: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return a stored tensor in the dtype of the network; raise ModelError if its shape or kind differs."""
    if tensor.shape != empty.shape:
        raise ModelError(
            f"{name} has shape {tuple(tensor.shape)}, but config.json describes {tuple(empty.shape)}. "
            f"These files do not belong together. Fetch the folder again."
        )
    if not tensor.is_floating_point():
        if empty.is_floating_point():
            raise ModelError(
                f"{name} is stored as {tensor.dtype}, not as floating-point numbers. Fetch the folder again."
            )
        return tensor
    return tensor.to(dtype)


def _put(root: nn.Module, names: Sequence[str], tensor: Tensor) -> None:
    """Set a parameter or buffer under all of its names."""
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        path, _, last = name.rpartition(".")
        module = root.get_submodule(path)
        if last in module._parameters:
            module._parameters[last] = parameter
        else:
            module._buffers[last] = tensor


def _owner(network: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost transformers model that holds a module; it computes the module's buffers."""
    models = [(name, module) for name, module in network.named_modules() if isinstance(module, PreTrainedModel)]
    return [network, *(module for name, module in models if f"{path}.".startswith(f"{name}."))][-1]
