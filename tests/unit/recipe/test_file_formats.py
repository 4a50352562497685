"""What a format holds is one fact, which commands refuse by before torch is loaded and layers are checked by."""

from typing import get_args

import pytest
import torch

from nearplane.errors import RecipeError
from nearplane.formats.compressed_tensors.compressed_tensors_format import PACKINGS
from nearplane.formats.table import FORMATS
from nearplane.lattice.fits import FITS
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.scale import Steps
from nearplane.lattice.shared_grid import UNIT_PEAK
from nearplane.number_formats import BY_NAME, integers
from nearplane.recipe.file_formats import Format
from nearplane.recipe.readers import Weights, readers_of
from nearplane.recipe.runtimes import FLOATS

NUMBER_FORMATS = [
    *(each for name, each in BY_NAME.items() if name != "coded"),
    *(
        integers(bits, group, symmetric=symmetric)
        for bits in range(2, 9)
        for group in (None, 32)
        for symmetric in (0, 1)
    ),
    *(integers(bits, group, minimum=True) for bits in range(2, 9) for group in (16, 32, 64)),
]


@pytest.mark.parametrize("into", get_args(Format))
def test_a_layer_that_suits_every_format_is_refused_exactly_where_the_table_has_a_fault(into):
    """The shape is a multiple of all blocks, groups and tiles, so that only the number format decides, and no runtime."""
    if into == "nearplane":
        return
    refused = {}
    for format in NUMBER_FORMATS:
        try:
            FORMATS[into].layers.check("a", (256, 512), "Linear", format)
        except RecipeError as error:
            refused[format] = str(error)
    fault_of = readers_of(into, "nearplane").fault
    faults = {format: fault for format in NUMBER_FORMATS if (fault := fault_of(Weights(format))) is not None}
    assert refused == {format: f"a: {fault}" for format, fault in faults.items()}
    assert 0 < len(refused) < len(NUMBER_FORMATS)


@pytest.mark.parametrize("into", [each for each in get_args(Format) if each != "nearplane"])
def test_a_format_stores_every_number_format_that_the_table_gives_it(into):
    readers, layout = readers_of(into, "nearplane"), FORMATS[into].layers
    dtype = torch.float32 if into == "mlx" else torch.float16  # a minimum of MLX is the product of a step and a zero
    W = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).mul(0.02)
    stored = [format for format in NUMBER_FORMATS if readers.takes(Weights(format))]
    assert stored
    for format in stored:
        peak = UNIT_PEAK if format.global_scale else None
        grid, _ = FITS[format.fit](
            W, torch.ones(512), Steps(format=format, search="mse", storage=torch.float16, peak=peak)
        )
        matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
        held = layout.held(matrix, format)
        read = layout.unpack("a", layout.pack("a", held.matrix, dtype), held.format)
        assert torch.equal(read.codes, held.matrix.codes), format.name
        error = (read.decode() - matrix.decode()).abs().max()
        ulp = torch.finfo(torch.float32).eps * W.abs().max()  # of that product, where a minimum is a real number
        assert error <= (ulp if format.minimum else 0), format.name


def test_floats_of_compressed_tensors_are_those_of_its_packings():
    held = [each.HOLDS for each in PACKINGS if each.HOLDS is not None and each.HOLDS.levels is not None]
    assert [each.name for each in held] == list(FLOATS)
