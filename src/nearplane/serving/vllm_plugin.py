"""Entry point of the package nearplane-vllm, which vLLM calls in every process that it starts, perhaps several times.

vLLM does not guard these calls: an error here would stop every model. So whatever fails is logged, and vLLM then says of a folder
of nearplane what it says of all unknown ones: "Unknown quantization method: nearplane".
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Tell vLLM of nearplane's quantization method."""
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from nearplane.serving.vllm_config import METHOD, CodedConfig

        register_quantization_config(METHOD)(CodedConfig)
    except Exception:
        log.exception("nearplane-vllm does not fit this vLLM, which will not load folders of nearplane")
