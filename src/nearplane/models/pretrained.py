"""Empty networks and tokenizers that transformers builds from a folder.

All reading of configs and tokenizers by transformers goes through this file. Folders that would take minutes
or all memory are refused beforehand, and every error that transformers raises becomes one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import tokenizer_class_from_name
from transformers.utils import logging as of_transformers

from nearplane.errors import ModelError, NearplaneError, first_line, is_of_caller
from nearplane.models.config_checks import BuildBudget, believe_tensors, check_config, check_sizes
from nearplane.models.download_log import DownloadLog
from nearplane.models.kinds import SPEECH_TYPES, hears_alone, is_headless, is_multimodal, is_seq2seq
from nearplane.system.files import read_object
from nearplane.system.fp8_mxfp4 import WidenedReader
from nearplane.system.memory import is_out_of_memory, is_refused
from nearplane.system.paths import (
    ADAPTER_CONFIG,
    CODE,
    FILES,
    folder_named,
    named_in_code,
    refuse_adapter,
    refuse_unfinished,
)
from nearplane.system.safetensors_files import ShardReader, TensorReader
from nearplane.system.source_storage import refuse_leftover

logger = logging.getLogger(__name__)

ONLY_CONFIG = ("config.json", ADAPTER_CONFIG)
LETTERS = "aA1の"  # one of them is a token in every vocabulary; others may be nothing
MAX_QUOTED_LETTERS = 400  # letters of a message of transformers that an error quotes
TOKENIZER, PIECES = "tokenizer.json", "tokenizer.model"
GENERATION = "generation_config.json"  # tokens that end a text, among other settings
OTHER_TOKENIZERS = (PIECES, "tokenizer_config.json", "vocab.json", "vocab.txt")  # alternatives to tokenizer.json
READERS = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}  # {package to read PIECES: its module}


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Convert any error raised within into a ModelError that begins with `what`.

    Errors of nearplane and of functions that the caller passed (see `of_caller`) and a full device stay as they are.
    """
    try:
        yield
    except BaseException as error:
        raised = isinstance(error, Exception) or type(error).__name__ == "PanicException"  # of tokenizers, in Rust
        limits = is_out_of_memory(error) or is_refused(error)
        if isinstance(error, NearplaneError) or is_of_caller(error) or limits or not raised:
            raise
        message = " ".join(str(error).split())[:MAX_QUOTED_LETTERS]  # all lines: the first is often a heading
        raise ModelError(f"{what} ({': '.join(part for part in (type(error).__name__, message) if part)}).") from error


@contextmanager
def without_bars() -> Iterator[None]:
    """A context in which transformers shows no bars of its own; they are as before behind it."""
    shown, hidden = of_transformers.is_progress_bar_enabled(), are_progress_bars_disabled()
    of_transformers.disable_progress_bar()  # and those of the hub
    try:
        yield
    finally:
        with catch_warnings(action="ignore"):  # of a variable of the environment, which stays in force
            if shown:
                of_transformers.enable_progress_bar()
            (disable_progress_bars if hidden else enable_progress_bars)()


def find_folder(source: str, *, trust_remote_code: bool = False, patterns: Sequence[str] = FILES) -> Path:
    """Return the local folder of a model, downloading the files of these patterns from the hub if `source` is an id.

    Raises:
        ModelError: There is no such folder, no such model, or no connection; or it comes with an adapter.
    """
    if (folder := folder_named(source)) is not None:
        return folder
    refuse_adapter(_fetched(source, ONLY_CONFIG), source)  # before the weights are fetched
    folder = _fetched(source, [*patterns, *([CODE] if trust_remote_code else [])])
    refuse_adapter(folder, source)
    if trust_remote_code and patterns is FILES and (named := named_in_code(folder)):
        _fetched(source, named)
    return folder


def _fetched(source: str, patterns: Sequence[str]) -> Path:
    """Return the folder with the files of these patterns of a model on the hub."""
    try:
        return Path(snapshot_download(source, allow_patterns=[*patterns], tqdm_class=DownloadLog))
    except GatedRepoError as error:
        raise ModelError(f"{source} is gated. Accept its terms on the hub and log in with `hf auth login`.") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{source} is neither a local folder nor a model on the hub that you may read.") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{source} is not a local folder, and the hub could not be reached. Pass a local folder, or check the connection."
        ) from error
    except Exception as error:  # the network and the disk raise anything
        raise ModelError(f"{source} could not be fetched from the hub ({first_line(error)}). Try again.") from error


def empty_network(
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantized: bool = False,
    reader: TensorReader | None = None,
) -> PreTrainedModel:
    """Build the language model of a folder, or the encoder (see `is_headless`), on the meta device.

    Args:
        folder: The folder of the model.
        dtype: Dtype of the weights; None: the dtype in config.json.
        trust_remote_code: Whether code that comes with the model may run.
        quantized: Whether the quantization_config is kept; else the network is built as if it were not quantized.
        reader: Reader of the tensors; None: a reader of safetensors files in the folder.

    Raises:
        ModelError: transformers cannot build the network, or it does not fit the weight files.
    """
    path = folder / "config.json"
    refuse_unfinished(folder)
    plain = read_object(path, expected="save_pretrained writes one into a model's folder", error=ModelError)
    reader = reader or ShardReader(folder)
    if not isinstance(reader, WidenedReader):
        refuse_leftover(folder, plain.get("quantization_config"), reader.infos.values())
    network = built(folder, plain, reader, dtype=dtype, trust_remote_code=trust_remote_code, quantized=quantized)
    if (folder / GENERATION).is_file():
        with as_model_error(f"transformers cannot read {folder / GENERATION}, which you may correct or remove"):
            transformers.GenerationConfig.from_pretrained(folder)
    believe_tensors(network, reader)
    check_sizes(network, reader, plain=plain.get("quantization_config") is None)
    reader.check_network(network.config.to_dict())
    return network


def built(
    folder: Path,
    plain: Mapping[str, Any],
    reader: TensorReader | None,
    *,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantized: bool = False,
) -> PreTrainedModel:
    """Build the network of a config on the meta device; `plain` are the contents of its config.json."""
    check_config(folder, plain, reader)
    with as_model_error(f"transformers cannot build a language model from {folder / 'config.json'}"):
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        for name in ("quantization_config", "quantization", "transformers_weights"):
            if hasattr(config, name) and not quantized:
                delattr(config, name)
        config.return_dict = True  # else outputs have no names
        options = {} if dtype is None else {"dtype": dtype}
        with torch.device("meta"), BuildBudget(folder, reader):
            return builder_of(config).from_config(config, trust_remote_code=trust_remote_code, **options)


def builder_of(config: Any) -> Any:
    """Return the Auto class of transformers that builds the network of a config with all of its parts.

    Raises:
        ModelError: The network takes sound and is of a type that nearplane does not support.
    """
    if is_headless(config):
        return transformers.AutoModel
    if is_seq2seq(config):
        return transformers.AutoModelForSeq2SeqLM
    if (architecture := hears_alone(config)) is not None:
        if config.model_type not in SPEECH_TYPES:
            raise ModelError(
                f"The architecture {architecture} is not supported: it takes sound, and nearplane supports "
                f"only sound models of the types {', '.join(SPEECH_TYPES)}. Use another model, or another tool."
            )
        return transformers.AutoModelForSpeechSeq2Seq
    return transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM


def tokenizer_of(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, without the dropout of merges that some were trained with: it draws other tokens each time.

    Raises:
        ModelError: The folder holds no tokenizer, or it is damaged or needs packages that are not installed.
    """
    only_pieces = (folder / PIECES).is_file() and not (folder / TOKENIZER).is_file()
    if only_pieces and (missing := [name for name, package in READERS.items() if not is_installed(package)]):
        raise ModelError(
            f"{folder} has its tokenizer as {PIECES}, for which transformers needs further packages. Run pip install "
            f"{' '.join(missing)}"
        )
    with as_model_error(f"{folder} has no tokenizer that transformers can load"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        files = {*tokenizer.vocab_files_names.values()}
        if files and not any((folder / name).is_file() for name in (TOKENIZER, *files, *OTHER_TOKENIZERS)):
            raise ModelError(  # transformers made an empty one of the class in config.json
                f"{folder} has no tokenizer; expected {' or '.join(sorted(files))}. Copy them from the original model."
            )
        merging: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if getattr(merging, "dropout", None):
            merging.dropout = None
        return tokenizer


def tokens_before(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that a tokenizer sets before every text, as those of Llama and Gemma set BOS; () if it sets none."""
    for text in LETTERS:
        with as_model_error("The model's tokenizer cannot tokenize a letter (fetch the model again)"):
            ids, letter = (
                list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
                for special in (True, False)
            )
        places = [place for place in range(len(ids)) if letter and ids[place : place + len(letter)] == letter]
        if places:
            return tuple(ids[: places[0]])
    return ()


def vocabulary_of(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that the class of a folder's tokenizer reads, also of one that a program registered.

    Those of all classes that come with transformers are on the list of `paths.py`, too, as they are fetched from the
    hub. Nothing is returned if the class is unknown here; files that trusted code names are found in its text.
    """
    with suppress(ModelError, ImportError):  # errors are those of `tokenizer_of`, if a tokenizer is needed
        config = read_object(folder / "tokenizer_config.json", expected="", error=ModelError)
        if isinstance(name := config.get("tokenizer_class"), str):
            return tuple(getattr(tokenizer_class_from_name(name), "vocab_files_names", {}).values())
    return ()


def is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    with suppress(ModuleNotFoundError, ValueError):  # its parent package is missing, or disabled
        return find_spec(package) is not None
    return False
