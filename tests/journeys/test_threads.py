"""The number of threads changes no bit: of sums and decompositions by themselves, and of whole runs."""

import os
import subprocess
import sys

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents
from nearplane.demo import CALIBRATION
from nearplane.lattice.bounds import losses_on_extra
from nearplane.lattice.factor import factorize, total
from nearplane.lattice.grid import Grid, QuantizedMatrix
from nearplane.lattice.moments import Extra
from nearplane.models.experts import make_observable
from nearplane.models.layers import is_stack
from nearplane.system.repeatable import divides_sums
from nearplane.theory.qr_factor import factorize_root

THREADS = (1, 2, 3)


@pytest.fixture
def threads():
    """Return a function that sets the number of threads; it is as it was afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def of_all(threads, compute):
    found = []
    for number in THREADS:
        threads(number)
        found.append(compute())
        assert torch.get_num_threads() == number
    return found


def test_sums_of_many_entries_are_the_same_for_any_number_of_threads(threads):
    x = torch.rand(300, 701, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for shape in ((300, 701), (210300,), (1, 210300), (3, 701, 100)):
        first, *others = of_all(threads, lambda shape=shape: total(x.reshape(shape)))
        assert all(torch.equal(first, other) for other in others)
        torch.testing.assert_close(first, x.sum())
    assert total(torch.tensor(3.0)) == 3


@pytest.mark.parametrize("n", [150, 500])
def test_factors_are_the_same_for_any_number_of_threads(threads, n):
    X = torch.randn(2 * n, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    H = X.T @ X / len(X)
    for compute in (lambda: factorize(H, "activation", damp=0.01), lambda: factorize_root(X, len(X), "activation")):
        first, *others = of_all(threads, compute)
        assert all(torch.equal(first.U, other.U) and torch.equal(first.d, other.d) for other in others)


MODE = """
import os, sys, torch, nearplane
nearplane.quantize_matrix(torch.eye(16), torch.eye(16, dtype=torch.float64), nearplane.GridScheme(group_size=16))
print(os.environ.get("MKL_CBWR"))
"""


@pytest.mark.parametrize(
    ("before", "after"), [(None, "AUTO,STRICT" if divides_sums() else "None"), ("COMPATIBLE", "COMPATIBLE")]
)
def test_a_function_asks_mkl_for_products_that_do_not_depend_on_threads(before, after):
    """As this process has done, where MKL divides sums by itself; a mode that the user has set stays."""
    others = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    own = {} if before is None else {"MKL_CBWR": before}
    done = subprocess.run([sys.executable, "-c", MODE], env=others | own, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [after]


@pytest.mark.parametrize("shape", [(116, 192, 308), (16, 192, 768), (192, 192, 1536), (768, 64, 384)])
def test_products_are_the_same_for_any_number_of_threads(threads, shape):
    """MKL divides the sums of these with AVX-512 if it is not told otherwise, and on some AMD processors if it is."""
    rows, columns, inner = shape
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(each, inner, generator=generator, dtype=torch.float64) for each in (rows, columns))
    first, *others = of_all(threads, lambda: A @ B.T)
    assert all(torch.equal(first, other) for other in others)


def test_experts_of_few_tokens_compute_the_same_for_any_number_of_threads(threads):
    """Expert i takes i + 1 rows: MKL multiplies 5 to 7 and 9 to 11 of them in another order with two threads than with one."""
    experts = 24
    config = config_of("mixtral", hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_experts=experts)
    network = random_model(config).float().requires_grad_(False)
    make_observable(network)
    (stack,) = (part for part in network.modules() if is_stack(part))
    chosen = torch.arange(experts).repeat_interleave(torch.arange(1, experts + 1))[:, None]
    x = torch.randn(len(chosen), config.hidden_size, generator=torch.Generator().manual_seed(0))
    first, *others = of_all(threads, lambda: stack(x, chosen, torch.ones(len(chosen), 1)))
    assert all(torch.equal(first, other) for other in others)


def test_losses_on_few_extra_tokens_are_the_same_for_any_number_of_threads(threads):
    """MKL multiplies 17 to 27 and 33 to 43 columns in another order with three threads than with one."""
    generator = torch.Generator().manual_seed(0)
    W, X = torch.randn(64, 64, generator=generator), torch.randn(140, 64, generator=generator)
    scale = torch.full((64, 1), 0.5)
    grid = Grid(scale=scale, zero=torch.zeros_like(scale), group=torch.zeros(64, dtype=torch.int32), low=-8, high=7)
    matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
    for tokens in (8, 20, 40, 70, 100, 140):
        extra = Extra(X_hat=X[:tokens], X=X[:tokens] + 0.1)
        first, *others = of_all(threads, lambda extra=extra: losses_on_extra(W, W, matrix, extra))
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "words",
    [
        dict(bits=3, group_size=32, symmetric=False, format="gptq_v2", allocate="slope"),
        pytest.param(dict(rate=2.0), marks=pytest.mark.nightly),
        pytest.param(dict(grid="q4_k", embeddings="q4_0"), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_runs_are_the_same_for_any_number_of_threads(threads, tmp_path, words):
    """Layers have 65,536 weights and more: enough for torch and MKL to share them among threads."""
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    random_model(config).float().save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    for number in THREADS[:2]:
        threads(number)
        out = tmp_path / f"{number}"
        nearplane.quantize(tmp_path / "model", out, calibration=str(CALIBRATION), samples=10, seqlen=64, **words)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
