"""An engine of vLLM in this process, so that its weights can be looked at, and the distance of its predictions from ours."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from written_folders import TOKENS

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def decoded(network: Any) -> dict[str, Tensor]:
    """Return the weights of the layers for which plain products stand."""
    return {name: module.plain for name, module in network.named_modules() if hasattr(module, "plain")}


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    """Keep the engine in this process, so that its weights can be looked at."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
            patch.setenv(name, value)
        yield


@contextmanager
def engine(folder: Path, dtype: str = "float32", **options: Any) -> Iterator[Any]:
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    made = None
    try:
        usual = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 2, "max_logprobs": 20}
        made = vllm.LLM(str(folder), dtype=dtype, **usual | options)
        yield made
    finally:
        if made is not None:
            made.llm_engine.engine_core.shutdown()
        del made
        gc.collect()
        cleanup_dist_env_and_memory()


def distance(made: Any, predicted: np.ndarray) -> float:
    """Return the largest difference of log-probabilities, at every token of a window over its 20 best and the one that came."""
    import vllm

    ask = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20)
    (answer,) = made.generate([{"prompt_token_ids": TOKENS}], ask, use_tqdm=False)
    return max(
        abs(given.logprob - predicted[place, token])
        for place, at in enumerate(answer.prompt_logprobs[1:])
        for token, given in at.items()
    )
