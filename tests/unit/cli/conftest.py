"""A random model of two narrow blocks, quantized, for commands that need a checkpoint but not a good one."""

import pytest

import nearplane
from families import DEMO_VOCABULARY, config_of, random_model
from nearplane.demo import CALIBRATION, MODEL


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random model of two narrow blocks, its checkpoint and the text: (model, checkpoint, text)."""
    folder = tmp_path_factory.mktemp("tiny")
    model, out, text = (folder / name for name in ("model", "out", "text.txt"))
    random_model(config_of("llama", vocab_size=DEMO_VOCABULARY, num_hidden_layers=2)).float().save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((MODEL / name).read_bytes())
    text.write_text(CALIBRATION.read_text()[:4000])
    nearplane.quantize(model, out, bits=3, group_size=32, calibration=str(text), samples=4, seqlen=40)
    return model, out, text
