#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.3: AutoTokenizer replaces how a tokenizer.json splits text if config.json says qwen2.
#
# A folder has a byte-level tokenizer.json that keeps runs of digits together, and a tokenizer_config.json that names the
# general class (TokenizersBackend). With model_type llama or qwen3 in config.json the ids are those of tokenizer.json.
# With model_type qwen2 they are others: the class of Qwen2 is taken in spite of tokenizer_config.json, and it puts its own
# splitting, one digit at a time, in the place of that of the file. No warning is given. Models of Qwen2's architecture that
# were trained with another tokenizer therefore get other tokens from transformers than from every program that reads
# tokenizer.json as it is (the tokenizers library, llama.cpp's converters, servers in Rust).
#
# Seen on 2026-11-30: qwen2 Qwen2Tokenizer differs; qwen3 TokenizersBackend same; llama the same. Exit code 1 if that changed.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3
cat > "$place/try.py" <<'PYTHON'
import json
import pathlib
import sys

import tokenizers
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

folder = pathlib.Path(sys.argv[1])
made = Tokenizer(models.BPE())
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
made.train_from_iterator(["in 1234 of 1234 years"] * 50, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
made.save(str(folder / "tokenizer.json"))
(folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
text, found = "in 1234 years", {}
expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
for kind in ("qwen2", "qwen3", "llama"):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    read = AutoTokenizer.from_pretrained(folder)
    ids = read(text, add_special_tokens=False)["input_ids"]
    found[kind] = (type(read).__name__, "same" if ids == expected else "differs")
    print(kind, *found[kind], ids, "in the file", expected)
print("transformers", transformers.__version__, "tokenizers", tokenizers.__version__)
wanted = {
    "qwen2": ("Qwen2Tokenizer", "differs"),
    "qwen3": ("TokenizersBackend", "same"),
    "llama": ("TokenizersBackend", "same"),
}
print("as described" if found == wanted else "changed")
sys.exit(found != wanted)
PYTHON
"$place/venv/bin/python" "$place/try.py" "$place"
