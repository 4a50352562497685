"""Packed layers on a GPU by Triton's kernels: run by its interpreter on tensors of the pretended GPU."""

from __future__ import annotations

import pytest

from triton_processes import DAILY, NIGHTLY, problems, triton_runs_here


def check(counts: dict[str, int]) -> None:
    """Compare loaded models and random products with what the CPU makes of them."""
    models, products = problems("packed_on_device", counts), problems("product_problems", counts)
    assert [model["kernels"] for model in models[:2]] == [False, True]
    for model in models:
        assert model["close"], model
        assert model["different"] == 0 < model["compared"], model
    now = models[1]
    assert now["products"] == 2 * now["layers"]
    assert now["loading"]["launches"] <= now["layers"] + 8  # of them: zeros, the lanes of all layers, one copy of each
    assert {product["few"] for product in products} == {True, False}
    for product in products:
        assert product["wrong"] == product["waits"] == 0, product
        assert product["error"] <= 1, product
        assert product["launches"] == 2 if product["few"] else product["launches"] <= 4, product


@triton_runs_here
def test_interpreted_kernels_load_and_multiply_as_the_cpu() -> None:
    """A model is loaded to the same bytes; products differ from exact ones by no more than sums in float32 do."""
    check(DAILY)


@triton_runs_here
@pytest.mark.nightly
def test_interpreted_kernels_read_layers_in_every_way_and_multiply_many_matrices() -> None:
    check(NIGHTLY)
