"""One layer solved on a pretended GPU: the codes of the CPU, and a stated number of waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from layer_launches import SCHEMES, count, kernels_of_cuda
from nearplane.lattice import bounds, kernels, polish
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.moments import Extra, Moments
from nearplane.lattice.scale import StepStorage
from nearplane.matrix.inputs import LayerInput, corrected
from nearplane.matrix.on_grid import joined
from nearplane.planning.solve_stage import solve_layer
from nearplane.recipe.block_scheme import BlockScheme
from nearplane.recipe.layer_plan import LayerPlan
from nearplane.recipe.rate_scheme import RateScheme
from nearplane.recipe.schemes import AnyScheme, GridScheme
from nearplane.record.record import LayerRecord
from pretended import Gpu, Pretend, pretended

LAYER = 13  # waits of a layer on a grid
STAGE = 20  # further waits of the first layer of a stage: factors of the inputs that its layers share
OUT, COLUMNS = 12, 64


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(kernels, "CPU", replace(kernels.CPU, cholesky=24))
    monkeypatch.setattr(kernels, "GPU", replace(kernels.GPU, cholesky=24, numbers=0))
    monkeypatch.setattr(polish, "SPAN", 32)
    monkeypatch.setattr(bounds, "MEASURED_ROWS", 8)
    with pretended() as opened:
        yield opened


def moments(place: type[Pretend] | None) -> tuple[Tensor, Moments]:
    """Return weights, and moments of inputs that the quantized network changes; on the card or on the CPU."""
    g = torch.Generator().manual_seed(0)
    W = torch.randn(OUT, COLUMNS, generator=g)
    X = torch.randn(200, COLUMNS, generator=g) @ torch.randn(COLUMNS, COLUMNS, generator=g) / 8
    X_hat = X + 0.05 * torch.randn(X.shape, generator=g)

    def put(x: Tensor) -> Tensor:
        return x if place is None else place(x.clone(), 0)

    def of(rows: slice, dtype: torch.dtype) -> Moments:
        x, x_hat = X[rows].to(dtype), X_hat[rows].to(dtype)
        H, C = (put(each.T @ x_hat / len(x)) for each in (x_hat, x))
        return Moments(H=H, C=C, tokens=len(x), alive=put(torch.ones(COLUMNS, dtype=torch.bool)))

    extra = Extra(X_hat=put(X_hat[:40]), X=put(X[:40]), sizes=(10, 30))
    held_out = of(slice(160, None), torch.float32)
    return put(W), replace(of(slice(None), torch.float64), held_out=held_out, extra=extra)


def solved(W: Tensor, inputs: LayerInput, scheme: AnyScheme) -> tuple[QuantizedMatrix, LayerRecord]:
    """Solve a layer."""
    target, storage = corrected(W, inputs, scheme), StepStorage(torch.float16, 4.0)
    rows = solve_layer("a layer", W, target, inputs, LayerPlan(scheme=scheme), storage)
    return joined([rows], inputs, scheme, name="a layer")


def waits_of_two_layers(gpu: Gpu, scheme: AnyScheme) -> list[int]:
    """Solve two layers of one stage, compare them with the CPU's, and return how often each waited for the card."""
    found = []
    W, statistics = moments(None)
    there, statistics_there = moments(Pretend)
    inputs, inputs_there = LayerInput.of(statistics), LayerInput.of(statistics_there)
    layers = (1.0, inputs, inputs_there), (1.5, inputs, inputs_there)
    for times, of_the_layer, of_the_layer_there in layers:
        gpu.forget()
        matrix, record = solved(there * times, of_the_layer_there, scheme)
        found.append(gpu.total.synchronizations + gpu.total.to_host)
        expected, expected_record = solved(W * times, of_the_layer, scheme)
        assert torch.equal(matrix.codes.held, expected.codes)
        assert record.relative_loss == pytest.approx(expected_record.relative_loss, rel=1e-6)
        assert record.extra_by_source == pytest.approx(expected_record.extra_by_source, rel=1e-5)
    return found


@pytest.mark.parametrize(
    "scheme",
    [
        GridScheme(bits=3, group_size=16),
        pytest.param(GridScheme(bits=2, group_size=16, symmetric=False), marks=pytest.mark.nightly),
        pytest.param(GridScheme(grid="nvfp4"), marks=pytest.mark.nightly),
        pytest.param(GridScheme(grid="mxfp4"), marks=pytest.mark.nightly),
        pytest.param(GridScheme(grid="fp8"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_layer_on_a_grid_waits_for_a_gpu_a_few_times(gpu: Gpu, scheme: GridScheme) -> None:
    first, second = waits_of_two_layers(gpu, scheme)
    most = LAYER + (scheme.bits == 2)  # so large a loss is not below all eigenvalues, which the limit asks first
    assert second <= most
    assert first <= most + STAGE


@pytest.mark.nightly
def test_a_layer_in_blocks_also_sends_its_weights_to_the_search_on_the_cpu(gpu: Gpu) -> None:
    first, second = waits_of_two_layers(gpu, BlockScheme(grid="q4_1"))
    assert second <= LAYER + 2
    assert first <= LAYER + 2 + STAGE


@pytest.mark.nightly
def test_a_layer_at_a_rate_waits_once_for_every_estimate_and_a_few_times_for_every_size(gpu: Gpu) -> None:
    first, second = waits_of_two_layers(gpu, RateScheme(rate=2.5, solver="nearest-plane"))
    assert second <= 40
    assert first <= 50 + STAGE


def test_a_layer_takes_at_most_414_launches_of_which_six_are_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that CUDA has; triangles are multiplied in four parts, as those of 4,096 columns are."""
    monkeypatch.setattr(bounds, "BLOCK_COLUMNS", 32)
    with kernels_of_cuda() as launches:
        gpu = count(16, 128, SCHEMES["4 bits"])
    assert launches == {"search": 1, "solve_pass": 2, "descend_pass": 4}
    assert gpu.total.launches <= 414
