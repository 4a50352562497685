"""What files of whole-number codes cannot hold is refused with the layer's name."""

from __future__ import annotations

import pytest
import torch

from nearplane.errors import FormatError
from nearplane.formats.integers import Integers
from nearplane.lattice.grid import Grid, QuantizedMatrix


def matrix(**grid: object) -> QuantizedMatrix[Grid]:
    """Return a matrix (1, 2) of codes 0 and 1 on a grid of steps of one."""
    fields = {"scale": torch.ones(1, 1), "zero": torch.zeros(1, 1), "group": torch.zeros(2, dtype=torch.int64)}
    return QuantizedMatrix(codes=torch.tensor([[0, 1]], dtype=torch.int32), grid=Grid(**(fields | grid)))


def test_codes_of_a_grid_read_back() -> None:
    found = Integers.of("layer 7", matrix(low=0, high=3), torch.float16).matrix()
    assert found.same_as(matrix(low=0, high=3))


def test_numbers_of_levels_are_not_taken_for_codes() -> None:
    levels = torch.tensor([0.0, 0.5, 1.0, 3.0])
    with pytest.raises(FormatError, match="layer 7: codes index 4 levels"):
        Integers.of("layer 7", matrix(low=0, high=3, levels=levels), torch.float16)


@pytest.mark.parametrize(("low", "high"), [(None, None), (0, 2), (-1, 1)])
def test_limits_that_are_no_width_are_refused(low: int | None, high: int | None) -> None:
    with pytest.raises(FormatError, match=r"layer 7: the codes range from .* expected a range of 2 to 8 bits"):
        Integers.of("layer 7", matrix(low=low, high=high), torch.float16)
