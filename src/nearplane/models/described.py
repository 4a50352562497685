"""A model as its config.json alone describes it: layers, shapes and names of tensors, without any weight file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from nearplane.errors import ModelError
from nearplane.models.conversion import as_saved
from nearplane.models.model import Model, open_model, refuse_quantized
from nearplane.models.pretrained import ONLY_CONFIG, built, find_folder
from nearplane.system.files import read_object
from nearplane.system.paths import folder_named
from nearplane.system.safetensors_files import DTYPE_NAMES, TensorInfo, TensorReader


class DescribedTensors(TensorReader):
    """Names, shapes and dtypes of the tensors as which transformers saves a network; none of them can be read.

    Args:
        folder: Folder of config.json.
        network: The network on the meta device.
    """

    def __init__(self, folder: Path, network: PreTrainedModel) -> None:
        self.folder = folder
        kept = {name for name, _ in network.named_parameters()}  # of tied ones, the first
        twice = {name for name, _ in network.named_parameters(remove_duplicate=False)} - kept
        left = twice | {*(network._keys_to_ignore_on_save or ())}
        state = {name: tensor for name, tensor in network.state_dict().items() if name not in left}
        self.infos = {
            name: TensorInfo(DTYPE_NAMES[each.dtype], tuple(each.shape), each.nbytes, folder / "config.json")
            for name, each in as_saved(network, state).items()
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Refuse to read.

        Raises:
            ModelError: Always.
        """
        raise ModelError(
            f"{self.folder} was opened by its config.json alone, so that {', '.join(names)} cannot be read."
        )


def open_described(source: str, *, trust_remote_code: bool = False) -> Model:
    """Open a model by its config.json alone, of which not more is downloaded from the hub.

    What config.json does not tell is missing: parts that transformers does not build, and dtypes of single tensors. A local
    folder with weights is opened by them, as the two may differ.

    Args:
        source: A local folder with config.json, or a hub id.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        ModelError: The model is missing, already quantized, or has no list of blocks.
    """
    if (local := folder_named(source)) is not None and any(local.glob("*.safetensors")):
        return open_model(source, trust_remote_code=trust_remote_code)
    folder = find_folder(source, trust_remote_code=trust_remote_code, patterns=ONLY_CONFIG)
    plain = read_object(folder / "config.json", expected="Pass what save_pretrained wrote", error=ModelError)
    refuse_quantized(source, folder, plain)
    network = built(folder, plain, None, trust_remote_code=trust_remote_code).eval()
    return Model(folder, network, DescribedTensors(folder, network), trust_remote_code=trust_remote_code)
