"""nearplane's quantization method in vLLM: which layers of a folder are entropy-coded, and what is refused before loading.

Layers are imported when the first one is made: vLLM 0.32 without Triton looks through all modules when a worker starts, and stops
at those of numba (`findings/vllm-cpu-numba-first.sh`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

METHOD = "nearplane"  # quant_method in config.json
FORMAT_VERSION, CODER = 1, "tans"  # of folders that are read
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")  # last parts of their names
TRIED = "0.32"  # version of vLLM for which this was written

log = logging.getLogger(__name__)


class CodedConfig(QuantizationConfig):  # type: ignore[misc]
    """The quantization_config of a folder.

    Args:
        config: That entry of config.json.

    Raises:
        ValueError: The folder is of another format, of a newer version, or holds experts.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        fields = {"coder": CODER, **config}
        for field, known in (("format_version", FORMAT_VERSION), ("coder", CODER)):
            if (value := fields.get(field)) != known:
                raise ValueError(
                    f"{field} in quantization_config is {value!r}; this version of nearplane-vllm reads {known}. Update it, or "
                    f"fetch config.json again."
                )
        modules = fields.get("modules")
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            raise ValueError(
                "quantization_config does not list the modules that are entropy-coded; nearplane-vllm serves folders of --rate "
                "and --size in nearplane's own format. Fetch config.json again, or serve a GGUF with llama.cpp."
            )
        if experts := [name for name in modules if ".experts." in name]:
            raise ValueError(
                f"{experts[0]} is an expert: vLLM multiplies all experts of a block by one kernel, which takes no entropy-coded "
                f"weights. Quantize with --runtime vllm --bits 4, or export the folder: nearplane export OUT dense."
            )
        self.modules = frozenset(modules)
        _warn_of_other_versions()

    def get_name(self) -> str:
        """Return the name of the method in config.json."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes of inputs."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPUs, 7.5: those that Triton compiles for."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files beside config.json that describe the method: none."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CodedConfig:
        """Return the method of a folder."""
        return cls(config)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules as vLLM does where its network has other names; it joins modules later, see `parts_of`."""
        renames = getattr(hf_to_vllm_mapper, "get_rename_mapper", lambda: hf_to_vllm_mapper)()
        renamed = renames.apply_list(
            [f"{name}.weight" for name in sorted(self.modules)]
        )  # rules name modules with a dot
        self.modules = frozenset(name.removesuffix(".weight") for name in renamed)

    def get_quant_method(self, layer: Any, prefix: str) -> QuantizeMethodBase | None:
        """Return how vLLM is to load and compute a layer; None: as it does without this method.

        Raises:
            ValueError: Some of the matrices that vLLM joins in the layer are entropy-coded, and some are not.
        """
        from nearplane.serving.vllm_layers import (
            CodedLinearMethod,
            HeadMethod,
            embedding_method,
        )

        embeds = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
        parts = parts_of(prefix or self._embeddings() * embeds, self.packed_modules_mapping)
        coded = [part for part in parts if part in self.modules]
        if isinstance(layer, VocabParallelEmbedding):
            if coded:
                return embedding_method(parts[0], torch.get_default_device())
            return UnquantizedEmbeddingMethod() if embeds else HeadMethod()
        if not isinstance(layer, LinearBase):
            return None
        if not coded:
            return UnquantizedLinearMethod()
        if len(coded) < len(parts):
            (left, *_) = (part for part in parts if part not in self.modules)
            raise ValueError(
                f"{coded[0]} is entropy-coded and {left} is not, but vLLM joins them in one layer. Quantize both or leave both out "
                f"with --ignore."
            )
        return CodedLinearMethod(parts)

    def _embeddings(self) -> str:
        """Return the name of the embeddings, which some models of vLLM do not tell their layer; "" if they are not coded."""
        return next((name for name in self.modules if name.rpartition(".")[2] in EMBEDDINGS), "")


def parts_of(prefix: str, joined: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names in the files of the matrices that vLLM joins in a layer; most often it is one.

    >>> parts_of("model.layers.0.mlp.gate_up_proj", {"gate_up_proj": ["gate_proj", "up_proj"]})
    ['model.layers.0.mlp.gate_proj', 'model.layers.0.mlp.up_proj']
    """
    path, dot, last = prefix.rpartition(".")
    return [f"{path}{dot}{name}" for name in joined.get(last, [last])]


def _warn_of_other_versions() -> None:
    """Log a warning if vLLM is of another version than the one that was tried."""
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(f"{TRIED}."):
            log.warning("nearplane-vllm was tried with vLLM %s; this is %s.", TRIED, found)
        return
