"""Lines on which tokenizers are compared, and the first text that two of them cut into different tokens. Needs no torch.

The lines are composed (NFC), because llama.cpp does not compose text as many tokenizers over bytes do.
"""

# ruff: noqa: RUF001  letters that look like others are what the lines are for

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Cut = Callable[[str], Sequence[int]]  # text -> token ids, without special tokens at its ends

LINES = (
    "The quick brown fox jumps over the lazy dog. THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG?",
    "I'm sure they'll say we've done what's right; SHE'D DONE IT, it's HE'S, y'all'd've 'quoted' \"twice\"",
    "0 1 12 123 1234 12345 3.14159 1,000,000.00 1e-9 0xFF 2026-11-27T21:30:59Z +49 (0)30 123456 50% #1 v2.0.1-rc3",
    "x²+y³=½ ⅓ ① Ⅳ ٣٤٥ १२३ 一二三 ᴮ ﬁ ｆｕｌｌ",
    "a  b   c    d     e        f\tg\t\th \t i ",
    "def f(x):\n    if x:\n        return [x for _ in range(10)]\n\n\treturn None\r\n\r\n\n\n# end\n",
    "    indented by four\n        by eight\n\tby a tab\n   \n\n",
    "for(int i=0;i<n;++i){a[i]+=b[i]*c[i];}/* x */ // y\n#include <stdio.h>\nstd::vector<T>&& v = {1, 2};",
    '{"name": "forecast", "arguments": {"city": "Zürich", "days": [1, 2, 3]}, "ok": true, "none": null}',
    '<div class="a">&nbsp;<br/></div> $\\frac{a}{b}$ **bold** `code` ~~~ === --- ... !!! ??? >>> <<< ||| &&& @@ __init__',
    "https://example.org/a/b?c=d&e=%20#f user.name+tag@example.co.uk C:\\Users\\x ~/.bashrc snake_case camelCase PascalCaseXML",
    "Übergrößenträger, naïve café, crème brûlée, ¿qué? ¡sí!, søsken, łódź, žluťoučký kůň, İstanbul, ẞ ß",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。「日本語」のテスト、カタカナとひらがな！한국어 문장입니다. １２３",
    "أنا قادر على أكل الزجاج و هذا لا يؤلمني. אני יכול לאכול זכוכית. मैं काँच खा सकता हूँ। ฉันกินกระจกได้",
    "🙂🙂 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ❤️ 1️⃣ ☃ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈",
    "non\u00a0breaking\u2009thin\u3000wide\u200bzero\u200djoined\u00adsoft\ufeffmark \u2028line \u0085next\x0bv\x0cf",
    "“quotes” ‘single’ — dash – en … ellipsis • bullet → arrow € £ ¥ © ® ™ § ¶ † ‰ ≤ ≠ ∑ √ ∞",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa AAAAAAAAAAAAAAAA ................ ________________ 0000000000000000",
)
DECOMPOSED = "e\u0301"  # the only other text on which llama.cpp may differ: it does not compose letters and accents
SHOWN_LETTERS, SHOWN_IDS = 60, 8


class Difference(NamedTuple):
    """The first line that two tokenizers cut differently, and its tokens by each, from the first that differs."""

    line: str
    ours: Sequence[int]
    theirs: Sequence[int]

    def __str__(self) -> str:
        """Return the line and its tokens as part of a sentence."""
        line = self.line if len(self.line) <= SHOWN_LETTERS else f"{self.line[:SHOWN_LETTERS]}.."
        same = next((n for n, ids in enumerate(zip(self.ours, self.theirs, strict=False)) if ids[0] != ids[1]), None)
        begin = min(len(self.ours), len(self.theirs)) if same is None else same
        ours, theirs = ([*ids[begin : begin + SHOWN_IDS]] for ids in (self.ours, self.theirs))
        return (
            f"the line {line!r} has from its token {begin + 1} on the ids {ours} in the one and {theirs} in the other"
        )


def differing_line(ours: Cut, theirs: Cut, texts: Iterable[str]) -> Difference | None:
    """Return the first line of the first text that two tokenizers cut into different tokens; None if there is none.

    A text of several lines is compared as a whole. If none of its lines differs without the spaces before it, the text
    counts as the line.
    """
    for text in texts:
        if [*ours(text)] != [*theirs(text)]:
            for part in (*(line.lstrip(" ") for line in text.splitlines(keepends=True)), text):
                ids = [*ours(part)], [*theirs(part)]
                if ids[0] != ids[1]:
                    return Difference(part, *ids)
    return None
