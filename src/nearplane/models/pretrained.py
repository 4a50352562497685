"""What transformers makes of a folder: an empty network, one with weights, a tokenizer.

All that reads configs, weights and tokenizers by transformers goes through here: what would take minutes or all memory is refused
before, and what transformers raises, which are programs of many makers, becomes one sentence.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from nearplane.errors import ModelError, NearplaneError, first_line
from nearplane.models.config_checks import BuildBudget, check_config, check_sizes
from nearplane.models.kinds import SPEECH_TYPES, hears_alone, is_headless, is_multimodal, is_seq2seq
from nearplane.system.files import read_object
from nearplane.system.paths import folder_named
from nearplane.system.safetensors_files import ShardReader, TensorReader, refuse_unfinished

FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
LONGEST = 400  # letters of what transformers says that an error repeats
TOKENIZER, PIECES = "tokenizer.json", "tokenizer.model"
OTHERS = (PIECES, "tokenizer_config.json", "vocab.json", "vocab.txt")  # files that a tokenizer may be in instead
READERS = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # what transformers reads PIECES with
GPTQ_READERS = "pip install optimum gptqmodel"  # what transformers loads weights of GPTQ with


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """Turn whatever is raised within into a ModelError that begins with `what`; nearplane's own errors pass."""
    try:
        yield
    except BaseException as error:
        raised = isinstance(error, Exception) or type(error).__name__ == "PanicException"  # that of tokenizers, in Rust
        if isinstance(error, NearplaneError) or not raised:
            raise
        said = " ".join(str(error).split())[:LONGEST]  # of several lines the first is often a heading
        raise ModelError(f"{what} ({': '.join(part for part in (type(error).__name__, said) if part)}).") from error


def find_folder(source: str, *, trust_remote_code: bool = False) -> Path:
    """Return the local folder of a model, fetching it from the hub if `source` is an id.

    Raises:
        ModelError: one sentence: no such folder, no such model, or no connection.
    """
    if (folder := folder_named(source)) is not None:
        return folder
    try:
        return Path(snapshot_download(source, allow_patterns=[*FILES, *(["*.py"] if trust_remote_code else [])]))
    except GatedRepoError as error:
        raise ModelError(f"{source} is gated: accept its terms on the hub and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{source} is neither a folder here nor a model on the hub that you may read.") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{source} is no folder here, and the hub could not be reached to fetch it; "
            f"pass a local folder or check the connection."
        ) from error
    except Exception as error:  # whatever the network stack and the disk raise
        raise ModelError(f"{source} could not be fetched from the hub ({first_line(error)}). Try again.") from error


def empty_network(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantized: bool = False,
    reader: TensorReader | None = None,
) -> PreTrainedModel:
    """Build the language model of a folder on the meta device, or the encoder, see `is_headless`.

    Args:
        dtype: of its weights; None: what config.json says.
        trust_remote_code: run model code that comes with the checkpoint.
        quantized: leave what config.json says of quantization; else as if it had never been quantized.
        reader: of its tensors; None: it is a folder of safetensors.

    Raises:
        ModelError: transformers builds none, or it is not the network of the weights beside it.
    """
    path = folder / "config.json"
    refuse_unfinished(folder)
    plain = read_object(path, expected="A model's folder has one that save_pretrained wrote", error=ModelError)
    reader = reader or ShardReader(folder)
    check_config(plain, reader)
    with in_a_sentence(f"transformers builds no language model from {path}"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        for said in ("quantization_config", "transformers_weights"):
            if hasattr(config, said) and not quantized:
                delattr(config, said)
        wanted = {} if dtype is None else {"dtype": dtype}
        with torch.device("meta"), BuildBudget(reader):
            network = _builder(config).from_config(config, trust_remote_code=trust_remote_code, **wanted)
    check_sizes(network, reader)
    return network


def _builder(config: Any) -> Any:
    """Return the class of transformers that builds the network of a config with all its parts, as its makers saved it.

    Raises:
        ModelError: it is given sound in a way that was never tried.
    """
    if is_headless(config):
        return transformers.AutoModel
    if is_seq2seq(config):
        return transformers.AutoModelForSeq2SeqLM
    if (made := hears_alone(config)) is not None:
        if config.model_type not in SPEECH_TYPES:
            raise ModelError(
                f"The architecture {made} is not supported: it is given sound, and of such models nearplane knows those of the "
                f"types {', '.join(SPEECH_TYPES)}. Leave this model as it is, or use another tool for it."
            )
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM


def network_of(
    folder: Path,
    *,
    dtype: torch.dtype | str,
    weights: dict[str, Tensor] | None = None,
    empty: PreTrainedModel | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load the language model of a folder, or the encoder; every weight must be there.

    Args:
        folder: of the model.
        dtype: to load in; "auto" is that of config.json.
        weights: by name, to take in place of those in the folder; None: what the folder holds, as transformers reads it.
        empty: from `empty_network`, if that was built already.

    Raises:
        ModelError: transformers loads none, or would fill weights with random numbers.
    """
    empty = empty or empty_network(folder, trust_remote_code=trust_remote_code)
    options: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    with in_a_sentence(f"transformers loads no language model from {folder}{_needs(folder)}"):
        if weights is None:
            options["trust_remote_code"] = trust_remote_code
            model, found = _builder(empty.config).from_pretrained(folder, **options)
        else:
            model, found = type(empty).from_pretrained(None, config=empty.config, state_dict=weights, **options)
    absent = sorted({*found["missing_keys"], *(str(name) for name, *_ in found["mismatched_keys"])})
    if absent:
        raise ModelError(
            f"{folder}: the weight files lack {len(absent)} of the weights that config.json describes, first {absent[0]}, "
            f"which would be random numbers. The two do not belong together; fetch the folder again."
        )
    return model.eval()


def tokenizer_of(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder.

    Raises:
        ModelError: the folder holds none, or a damaged one, or one that needs packages that are not there.
    """
    alone = (folder / PIECES).is_file() and not (folder / TOKENIZER).is_file()
    if alone and (missing := [name for name, package in READERS.items() if not _there(package)]):
        raise ModelError(
            f"{folder} holds its tokenizer as {PIECES}, which transformers reads with further packages: pip install "
            f"{' '.join(missing)}"
        )
    with in_a_sentence(f"{folder} holds no tokenizer that transformers can load"):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)


def _there(package: str) -> bool:
    """Return whether a package can be imported."""
    with suppress(ModuleNotFoundError, ValueError):  # what it lies in is missing, or was made unavailable
        return find_spec(package) is not None
    return False


def has_other_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer in other files than tokenizer.json."""
    return not (folder / TOKENIZER).is_file() and any((folder / name).is_file() for name in OTHERS)


def save_tokenizer(folder: Path, place: Path, *, trust_remote_code: bool = False) -> None:
    """Save the tokenizer of a model as transformers does, with the config, which may name special tokens, into another folder.

    Raises:
        ModelError: it cannot be loaded, or saved.
    """
    tokenizer = tokenizer_of(folder, trust_remote_code=trust_remote_code)
    with in_a_sentence(f"{folder} holds a tokenizer that transformers cannot save"):
        tokenizer.save_pretrained(place)
    shutil.copyfile(folder / "config.json", place / "config.json")


def _needs(folder: Path) -> str:
    """Return what transformers needs to load weights as they are quantized, as part of a sentence."""
    plain = read_object(folder / "config.json", expected="A model's folder has one", error=ModelError)
    config = plain.get("quantization_config")
    if isinstance(config, dict) and config.get("quant_method") == "gptq":
        return f"; its gptq weights need {GPTQ_READERS} to be loaded packed"
    return ""
