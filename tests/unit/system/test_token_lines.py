"""The lines on which tokenizers are compared, and the first that two of them cut differently."""

from __future__ import annotations

import unicodedata

from nearplane.system.token_lines import LINES, differing_line


def letters(text: str) -> list[int]:
    return [*map(ord, text)]


def test_the_lines_are_composed() -> None:
    """Else tokenizers that compose text would differ from llama.cpp, which does not."""
    assert [line for line in LINES if unicodedata.normalize("NFC", line) != line] == []


def test_the_lines_hold_what_tokenizers_cut_in_different_ways() -> None:
    text = "".join(LINES)
    assert {unicodedata.category(letter) for letter in text} >= {
        "Lu",
        "Ll",
        "Lm",
        "Lo",
        "Mn",
        "Mc",
        "Nd",
        "No",
        "Nl",
        "Zs",
    }
    assert all(
        part in text
        for part in ("12345", "\n    ", "\n\n", "\r\n", "\t", "   ", "日本語", "👩‍👩‍👧‍👦", "I'm", '{"', "ﬁ")
    )


def test_the_first_line_that_differs_is_named_with_its_tokens() -> None:
    texts = ["the same", "one\ntwo Two\nthree Two\n"]
    difference = differing_line(letters, lambda text: letters(text.replace("T", "t")), texts)
    assert str(difference) == (
        r"the line 'two Two\n' has from its token 5 on the ids [84, 119, 111, 10] in the one and [116, 119, 111, 10] in the other"
    )
    assert differing_line(letters, letters, texts) is None


def test_a_text_that_differs_only_as_a_whole_is_the_line() -> None:
    difference = differing_line(letters, lambda text: letters(text.replace("\n\n", "\n")), ["a\n\nb" + 99 * "c"])
    assert difference is not None
    assert difference.line.startswith("a\n\nb")
    assert str(difference).startswith(r"the line 'a\n\nbccc")
    assert "ccc..' has from its token 3 on the ids [10, 98, 99," in str(difference)
