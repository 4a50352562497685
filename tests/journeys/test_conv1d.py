"""GPT-2 stores weights as (in, out): what is quantized and what is ignored both come back the right way round."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer
from nearplane.demo import CALIBRATION
from nearplane.formats.stored import read_matrices
from nearplane.verbs.evaluate import load_dense


def test_gpt2_with_ignored_layers_is_evaluated_as_it_was_written(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=2, n_head=4, n_positions=128, vocab_size=TEXT_VOCABULARY, bos_token_id=0, eos_token_id=1
    )
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    add_tokenizer(tmp_path / "gpt2")
    words = {"ignore": ["attn.c_proj"], "group_size": 32, "samples": 8, "seqlen": 32, "calibration": str(CALIBRATION)}
    nearplane.quantize(tmp_path / "gpt2", tmp_path / "out", bits=4, format="gptq", **words)
    for name, matrix in read_matrices(tmp_path / "out"):
        model.get_submodule(name).weight.data = matrix.decode().T.contiguous()
    loaded, _ = load_dense(tmp_path / "out", torch.device("cpu"))
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
