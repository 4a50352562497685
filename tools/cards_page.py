"""Write docs/cards.md: the model card of the demo in each file format, quantized on the spot.

python tools/cards_page.py        (about two CPU minutes; losses and versions are those of this machine)
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import tempfile
from pathlib import Path
from textwrap import fill
from typing import Any

import nearplane
from nearplane.cli.app import app
from nearplane.demo import CALIBRATION, HELD_OUT, MODEL

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cards.md"
WINDOWS = {"samples": 32, "seqlen": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # heading: the options of the command, and of the function
    "compressed-tensors, 4 bits": ("--bits 4", {"bits": 4}),
    "NVFP4": ("--grid nvfp4", {"grid": "nvfp4"}),
    "GPTQ, 3 bits": ("--bits 3 --no-symmetric --format gptq_v2", {"bits": 3, "symmetric": False, "format": "gptq_v2"}),
    "MLX, 4 bits": ("--bits 4 --group-size 64 --format mlx", {"bits": 4, "group_size": 64, "format": "mlx"}),
    "GGUF": ("--grid q4_k_m", {"grid": "q4_k_m"}),
    "Entropy-coded": ("--rate 2.5", {"rate": 2.5}),
}
COMMON = (
    "The original was a local",
    "No license is",
    "This was measured while",
    "Bits per weight count",
    "`FOLDER` stands",
)
HEAD = """# Model cards

Every folder that nearplane writes has a README.md, the *model card*, which a model hub shows beside the files. It says
what the model is, how programs load it, what was lost and how it was made. Below is the card of the demo in each
format, written by `python tools/cards_page.py`, which wraps long lines. The first is whole, with an evaluation, and
of the others only what differs is shown. The original lies in a local folder here, so the cards name no `base_model`.

The [page on serving](serving.md#the-model-card) says how a card is kept and how an evaluation is added.
"""


def main() -> None:
    """Quantize the demo in every format and write the page."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    parts = [HEAD]
    for number, (title, (typed, options)) in enumerate(KINDS.items()):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            nearplane.quantize(MODEL, out, calibration=str(CALIBRATION), **WINDOWS, **options)
            if number == 0:
                nearplane.card(out, evaluation=evaluation(out))
            card = (out / "README.md").read_text()
        windows = " ".join(f"--{name} {value}" for name, value in WINDOWS.items())
        parts.append(
            f"\n## {title}\n\n```console\nnearplane quantize $MODEL out {typed} --calibration $TEXT {windows}\n"
        )
        if number == 0:
            parts.append(
                f"nearplane evaluate out --text $HELDOUT {windows} --against $MODEL --json > evaluation.json\n"
                "nearplane card out --evaluation evaluation.json\n"
            )
        parts.append(f"```\n\n````markdown\n{wrapped(card if number == 0 else shortened(card))}\n````\n")
    PAGE.write_text("".join(parts))


def evaluation(out: Path) -> Path:
    """Return a file with what `nearplane evaluate --json` prints of a checkpoint."""
    words = ["evaluate", str(out), "--text", str(HELD_OUT), "--against", str(MODEL), "--json"]
    words += [word for name, value in WINDOWS.items() for word in (f"--{name}", str(value))]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        app(words, result_action="return_value")
    (file := out.parent / "evaluation.json").write_text(printed.getvalue())
    return file


def shortened(card: str) -> str:
    """Return a card without the sections and sentences that are the same in every format."""
    kept = re.sub(r"(?s)\n## How it was made\n.*", "", card)
    kept = re.sub(rf"\n({'|'.join(COMMON)}).*", "", kept)
    return re.sub(r"\n{3,}", "\n\n", kept).strip()


def wrapped(card: str) -> str:
    """Return a card whose sentences have lines of at most 118 letters; tables and code stay as they are."""
    lines, code = [], False
    for line in card.strip().splitlines():
        code ^= line.startswith("```")
        plain = len(line) > 118 and not (code or line.startswith(("|", "<!--")))
        indent = "  " if line.startswith("- ") else ""
        lines.append(fill(line, 118, subsequent_indent=indent, break_on_hyphens=False) if plain else line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
