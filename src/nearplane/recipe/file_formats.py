"""Formats of checkpoints by name, and what holds of their files whoever reads them. Needs no torch.

No format is written here: `formats/table.py` holds the layout of a layer's tensors in a file, under the same names. Which weights
programs load from them is in `runtimes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Format = Literal["compressed-tensors", "gptq", "gptq_v2", "awq", "mlx", "gguf", "nearplane"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Files of one format.

    Args:
        any_network: Whether readers accept encoders and encoder-decoder models besides language models.
        every_tensor: Whether readers load also the tensors that transformers leaves out.
        minimum: Whether integers have a real-valued minimum in every group; embeddings and head may then be quantized, too.
        block_types: Whether layers have types of blocks.
        one_file: Whether a checkpoint is one file, with tokenizer and run record in it, whose other matrices are never float32.
        steps_of_model: Whether steps have the dtype of the model.
        entropy_coded: Whether layers are entropy-coded, as in no other format.
        library: The hub's name of the library that loads the format, for the model card.
        needs: Packages that this library needs besides itself.
        rounds_inputs: Whether files can ask runtimes to round the inputs of layers, and have a place for scales of their cache.
    """

    any_network: bool = False
    every_tensor: bool = False
    minimum: bool = False
    block_types: bool = False
    one_file: bool = False
    steps_of_model: bool = False
    entropy_coded: bool = False
    library: str = "transformers"
    needs: str = ""
    rounds_inputs: bool = False


FILE_FORMATS: dict[str | None, FileFormat] = {
    "compressed-tensors": FileFormat(
        any_network=True, steps_of_model=True, rounds_inputs=True, needs="compressed-tensors"
    ),
    "gptq": FileFormat(needs="gptqmodel and optimum"),
    "gptq_v2": FileFormat(needs="gptqmodel and optimum"),
    "awq": FileFormat(needs="gptqmodel and accelerate"),
    "mlx": FileFormat(every_tensor=True, minimum=True, steps_of_model=True, library="mlx"),
    "gguf": FileFormat(every_tensor=True, block_types=True, one_file=True, library="llama-cpp-python"),
    "nearplane": FileFormat(any_network=True, entropy_coded=True, library="nearplane"),
    None: FileFormat(),  # not chosen yet
}
