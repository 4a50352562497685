"""The number of threads changes no bit: of sums and decompositions by themselves, and of whole runs."""

import pytest
import torch

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents
from nearplane.demo import CALIBRATION
from nearplane.lattice.factor import factorize, total
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
