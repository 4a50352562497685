"""The network as a function of what is trained: its divergence and gradient are those of whole networks."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

from families import config_of, random_model
from nearplane.lattice.grid import QuantizedMatrix
from nearplane.lattice.rounded_inputs import rounded
from nearplane.lattice.scale import Steps
from nearplane.loading.dense_network import dense_network
from nearplane.loading.rounded_layers import round_inputs
from nearplane.models.divergence import Divergence
from nearplane.models.model import open_model
from nearplane.number_formats import INT8_TOKEN, integers
from nearplane.tuning.network import TunedNetwork, norms_of
from nearplane.tuning.parameters import TunedMatrix, TunedVector
from nearplane.tuning.schedule import FixedSteps
from nearplane.tuning.settings import Split
from nightly import daily
from pretended import pretended
from unordered import Unordered

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "gpt2", "gemma3_text", "opt")


@pytest.fixture(params=FAMILIES)
def case(request, tmp_path, generator):
    """Return a model, tuned matrices and norms of it that are off, and windows."""
    random_model(config_of(request.param)).float().save_pretrained(tmp_path)
    model = open_model(str(tmp_path))
    dense = dense_network(tmp_path)
    steps = Steps(format=integers(3, 8), search="mse", storage=torch.float16)
    matrices = {}
    for layer in model.layers:
        W = layer.under(dense, "").read()
        grid = steps.grid(W)
        matrices[layer.name] = TunedMatrix(
            layer.name, QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid), torch.float16, codes="q" in layer.name
        )
    norms = {name: dense.get_parameter(name).detach() for name in norms_of(model.network)}
    vectors = {name: TunedVector(weights, CPU, 0.1) for name, weights in norms.items()}
    windows = torch.randint(3, 96, (6, 12), generator=generator)
    return model, dense, matrices, vectors, windows


def whole(model, dense, matrices, vectors, windows):
    """Return the mean KL by running both networks whole."""
    given = {layer.parameter: layer.arranged(matrices[layer.name].values()) for layer in model.layers}
    given |= {name: each.values() for name, each in vectors.items()}
    found = functional_call(dense, given, (windows,), {"use_cache": False}).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        expected = dense(windows, use_cache=False).logits[:, :-1].log_softmax(-1)
    return (expected.exp() * (expected - found)).sum(-1).mean()


def leaves(matrices, vectors):
    return [leaf for each in (*matrices.values(), *vectors.values()) for leaf in each.trained().values()]


def test_divergence_and_gradients_are_those_of_whole_networks(case, generator):
    model, dense, matrices, vectors, windows = case
    cut = Split(windows=windows, training=4, batch=2, samples=6, found=6, schedule=FixedSteps(1))
    networks = [TunedNetwork(model, matrices, vectors, cut, hold=hold) for hold in (False, True)]
    with torch.no_grad():
        for leaf in leaves(matrices, vectors):
            leaf.add_(torch.randn(leaf.shape, generator=generator))
    wanted = whole(model, dense, matrices, vectors, windows[:4])
    there = torch.autograd.grad(wanted, leaves(matrices, vectors), allow_unused=True)
    for network in networks:
        with network.ready():
            measured = sum((part for parts in network.divergences([0, 1]) for part in parts), Divergence())
            found = network.backward(0) + network.backward(1)
        assert measured.kl / measured.tokens == pytest.approx(float(wanted.detach()), rel=1e-5)
        assert found.kl == pytest.approx(measured.kl, rel=1e-6)
        reached = 0
        for leaf, gradient in zip(leaves(matrices, vectors), there, strict=True):
            if gradient is None:
                assert leaf.grad is None or not bool(leaf.grad.any())
                continue
            reached += 1
            assert torch.allclose(leaf.grad / 2, gradient, rtol=1e-3, atol=1e-5 * float(gradient.abs().max()))
            leaf.grad = None
        assert reached >= len(matrices) + 2


def test_inputs_are_rounded_in_the_quantized_network_alone_and_gradients_pass_through(case):
    model, dense, matrices, vectors, windows = case
    cut = Split(windows=windows, training=4, batch=4, samples=6, found=6, schedule=FixedSteps(1))
    change = {layer.name: partial(rounded, how=INT8_TOKEN) for layer in model.layers}
    network = TunedNetwork(model, matrices, vectors, cut, inputs=change)
    with network.ready():
        found = network.backward(0)
    given = {layer.parameter: layer.arranged(matrices[layer.name].values()) for layer in model.layers}
    given |= {name: each.values() for name, each in vectors.items()}
    with torch.no_grad():
        expected = dense(windows[:4], use_cache=False).logits[:, :-1].log_softmax(-1)
    straight = {layer: lambda x: x + (rounded(x, INT8_TOKEN) - x).detach() for layer in model.layers}
    with round_inputs(straight, dense):
        log_probs = functional_call(dense, given, (windows[:4],), {"use_cache": False}).logits[:, :-1].log_softmax(-1)
    kl = (expected.exp() * (expected - log_probs)).sum(-1).mean()
    assert found.kl / found.tokens == pytest.approx(float(kl.detach()), rel=1e-4)
    assert float(kl.detach()) != pytest.approx(
        float(whole(model, dense, matrices, vectors, windows[:4]).detach()), rel=1e-3
    )
    there = torch.autograd.grad(kl, leaves(matrices, vectors), allow_unused=True)
    for leaf, gradient in zip(leaves(matrices, vectors), there, strict=True):
        if gradient is not None:
            assert torch.allclose(leaf.grad, gradient, rtol=1e-2, atol=1e-4 * float(gradient.abs().max()))


def test_norms_are_found_by_structure(tmp_path):
    names = norms_of(random_model(config_of("qwen3")))
    assert "model.norm.weight" in names
    assert "model.layers.0.self_attn.q_norm.weight" in names
    assert not any("proj" in name or "embed" in name for name in names)
    assert {"transformer.ln_f.weight", "transformer.ln_f.bias"} <= set(norms_of(random_model(config_of("gpt2"))))


@pytest.mark.parametrize("hold", daily([False, True], [False]))
def test_a_gpu_adds_in_a_fixed_order_and_is_waited_for_once_a_step_for_gradients(hold, tmp_path, generator):
    random_model(config_of("llama", num_hidden_layers=2)).float().save_pretrained(tmp_path)
    model, steps = open_model(str(tmp_path)), Steps(format=integers(3, 8), search="mse", storage=torch.float16)
    with pretended() as gpu, Unordered() as seen:
        matrices, place = {}, torch.device("pretend:0")
        for block in model.blocks:
            with block.on(place, torch.float32, original=False):
                for layer in block.quantized_layers():
                    grid = steps.grid(W := layer.read())
                    matrix = QuantizedMatrix(codes=grid.round(W)[0].int(), grid=grid)
                    matrices[layer.name] = TunedMatrix(layer.name, matrix, torch.float16, codes=True)
        windows = torch.randint(3, 96, (4, 12), generator=generator)
        cut = Split(windows=windows, training=4, batch=2, samples=4, found=4, schedule=FixedSteps(1))
        network = TunedNetwork(model, matrices, {}, cut, hold=hold)
        gradients = []
        with network.ready():
            for _ in range(2):
                gpu.forget()
                network.backward(0)
                gradients.append([leaf.grad.cpu() for leaf in leaves(matrices, {})])
                for leaf in leaves(matrices, {}):
                    leaf.grad = None
    assert seen.found == set()
    assert "_softmax_backward_data" in seen.operations
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert gpu.of("tuning/network.py").synchronizations == 1
    assert gpu.total.synchronizations - gpu.of("lattice/").synchronizations <= 4  # two are transformers' own
