"""llama.cpp's own quantizer through llama-cpp-python, for llama_files.py; runs in an environment that has it.

    python llama_quantize.py JOBS.json

JOBS.json is a list of {"source", "out", "type", "pure", "imatrix"}: GGUF files, a name as in LLAMA_FTYPE_MOSTLY_<TYPE>, whether all
layers of blocks get that type, and null or an .npz with the mean square of every input by tensor. Embeddings and head stay F32.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

F32 = 0
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: LINES.append(text.decode(errors="replace")))
LINES: list[str] = []


def quantize(source: str, out: str, type: str, pure: bool, imatrix: str | None) -> None:
    """Quantize one file; says nothing unless it fails."""
    LINES.clear()
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = 1
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type}")
    params.pure = pure
    params.token_embedding_type = params.output_tensor_type = F32
    kept: list[Any] = []  # what a struct of ctypes points to
    if imatrix is not None:
        data = {name: np.ascontiguousarray(value, np.float32) for name, value in np.load(imatrix).items()}
        entries = (llama_cpp.llama_cpp.llama_model_imatrix_data * (len(data) + 1))()  # the last, without name, ends it
        for entry, (name, value) in zip(entries, data.items(), strict=False):
            entry.name, entry.size = name.encode(), value.size
            entry.data = value.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_cpp.llama_model_imatrix_data))
        kept += [data, entries]
    status = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if status or (
        imatrix is not None and f"have importance matrix data with {len(kept[0])} entries" not in "".join(LINES)
    ):
        raise SystemExit(f"llama_model_quantize returned {status} for {type}:\n{''.join(LINES)}")


if __name__ == "__main__":
    llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
    for job in json.loads(Path(sys.argv[1]).read_text()):
        quantize(**job)
