"""What is known of a format of files without writing it: who reads it, and what these readers take. Needs no torch.

What a layer's tensors look like in it is in `formats/table.py`, under the same names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """A format of files.

    Args:
        any_network: whether readers take encoders, and encoders with a decoder, besides language models.
        one_grid_for_experts: whether the experts of all blocks are decoded by one number format.
        by_gptqmodel: whether GPTQModel reads it, also what transformers alone does not.
        for_llama_cpp: whether it is one file for llama.cpp: types of blocks, the tokenizer and the record are in it.
        steps_of_model: whether steps have the dtype of the model.
        by_nearplane: whether nearplane alone reads it.
    """

    any_network: bool = False
    one_grid_for_experts: bool = False
    by_gptqmodel: bool = False
    for_llama_cpp: bool = False
    steps_of_model: bool = False
    by_nearplane: bool = False


FILE_FORMATS: dict[str | None, FileFormat] = {
    "compressed-tensors": FileFormat(any_network=True, one_grid_for_experts=True, steps_of_model=True),
    "gptq": FileFormat(by_gptqmodel=True),
    "gptq_v2": FileFormat(by_gptqmodel=True),
    "gguf": FileFormat(for_llama_cpp=True),
    "nearplane": FileFormat(any_network=True, by_nearplane=True),
    None: FileFormat(),  # not chosen yet
}
