"""Small tokenizers of the kinds that large models have, trained on the demo's text."""

from __future__ import annotations

import io
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from nearplane.demo import CALIBRATION
from nearplane.formats.gguf.tokenizer import GPT2, PRE

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXT = CALIBRATION.read_text()[:200_000]


def over_bytes(name: str, size: int = 600) -> Tokenizer:
    """Return a tokenizer over bytes that cuts text as llama.cpp's pre-tokenizer of this name does."""
    expressions, whole = next(key for key, known in PRE.items() if known == name)
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    *cuts, last = expressions
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Digits(individual_digits=True) if cut == r"\p{N}" else split(cut) for cut in cuts
    ]
    if last == GPT2:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True))
    else:
        steps += [split(last), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def split(expression: str) -> pre_tokenizers.PreTokenizer:
    """Return what cuts text by an expression."""
    return pre_tokenizers.Split(Regex(expression), behavior="isolated")


def of_pieces(*, space: bool, size: int = 800) -> Tokenizer:
    """Return a tokenizer as SentencePiece's: "▁" for spaces, all pairs of a token's merges together, bytes for the unknown.

    With a space before text as Llama 2's, or without as Gemma's.
    """
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    learned.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), behavior="isolated")
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    learned.train_from_iterator([TEXT], trainer)
    pieces = [token for token, index in sorted(learned.get_vocab().items(), key=lambda each: each[1]) if index > 2]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: index for index, name in enumerate(names)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    end: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end])
    return tokenizer


def saved(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a tokenizer as transformers does."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def save_sentencepiece(folder: Path, size: int = 800) -> None:
    """Save a tokenizer as Llama 2 has it: a tokenizer.model of SentencePiece, no tokenizer.json."""
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=made,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=3,
    )
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def save_marian(folder: Path) -> None:
    """Save a tokenizer as translators of the type Marian have it: two files of SentencePiece and one vocabulary."""
    import sentencepiece

    pieces = set[str]()
    for side in ("source", "target"):
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT[:20_000].splitlines()), model_writer=made, vocab_size=150, minloglevel=3
        )
        (folder / f"{side}.spm").write_bytes(made.getvalue())
        reader = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
        pieces |= {reader.id_to_piece(index) for index in range(reader.get_piece_size())}
    names = ["</s>", "<unk>", *sorted(pieces - {"</s>", "<unk>"}), "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))
    config = {"tokenizer_class": "MarianTokenizer", "source_lang": "en", "target_lang": "en"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "marian"}))
