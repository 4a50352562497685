"""A random model of two narrow blocks, quantized, for commands that need a checkpoint but not a good one."""

import pytest

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from nearplane.demo import CALIBRATION


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random model of two narrow blocks, its checkpoint and the text: (model, checkpoint, text)."""
    folder = tmp_path_factory.mktemp("tiny")
    model, out, text = (folder / name for name in ("model", "out", "text.txt"))
    random_model(config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(model)
    add_tokenizer(model)
    text.write_text(CALIBRATION.read_text()[:4000])
    nearplane.quantize(model, out, bits=3, group_size=32, calibration=str(text), samples=4, seqlen=40)
    return model, out, text
