"""Standard streams that are closed, full or unread: the result and the exit code are those of a whole terminal."""

import shutil

import pytest

import nearplane
from children import command
from nearplane.demo import MODEL
from nearplane.record.record_file import read_record
from nightly import daily

LOST = {
    "closed": "nearplane: the output could not be printed in full: its stream is closed.\n",
    "full": "nearplane: the output could not be printed in full: No space left on device.\n",
    "unread": "",  # as after `| head`, which is meant
}
SPOILED = [
    *({1: state} for state in LOST),
    {2: "closed"},
    {2: "full"},
    {0: "closed", 1: "closed", 2: "closed"},
    {1: "full", 2: "full"},
]


def ended(words, streams=None):
    return command(*words, streams=streams).ended()


@pytest.mark.parametrize(
    "words",
    daily([("inspect", "{out}"), ("inspect", "{out}", "--json"), ("verify", "{faulty}")], [("verify", "{faulty}")]),
    ids=" ".join,
)
def test_what_cannot_be_printed_changes_neither_the_rest_nor_the_exit_code(words, tiny, tmp_path):
    shutil.copytree(tiny[1], tmp_path / "faulty")
    (tmp_path / "faulty" / "extra.py").write_text("import os")
    words = [word.format(out=tiny[1], faulty=tmp_path / "faulty") for word in words]
    code, out, err = ended(words)
    first = f"opening {tmp_path / 'faulty'} (torch is loaded first)\n" if words[0] == "verify" else ""
    assert (code, err) == (3 if words[0] == "verify" else 0, first)
    for streams in SPOILED:
        lost = LOST[streams[1]] if 1 in streams else ""
        assert ended(words, streams) == (code, "" if 1 in streams else out, "" if 2 in streams else first + lost), (
            streams
        )


@pytest.mark.parametrize(
    ("words", "expected", "said"),
    [(("inspect", "nowhere"), 1, "nowhere does not exist"), (("verify", "a", "--bitz"), 2, "Unknown option: --bitz")],
    ids=["refused", "mistyped"],
)
def test_a_refusal_is_printed_on_a_stream_that_is_left(words, expected, said):
    for streams in SPOILED:
        code, out, err = ended(words, streams)
        assert code == expected
        assert (said in err) == (2 not in streams)
        assert (said in out) == (2 in streams and 1 not in streams)
        assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("streams", "limit", "expected"),
    [
        pytest.param({2: "closed"}, 0.99, 0, marks=pytest.mark.nightly),
        ({1: "full"}, 1e-6, 4),
        ({0: "closed", 1: "closed", 2: "closed"}, 1e-6, 4),
    ],
    ids=str,
)
def test_a_checkpoint_is_whole_whatever_happens_to_what_is_printed(streams, limit, expected, tiny, tmp_path):
    """With descriptor 2 closed, the next file that is opened would take its place, and log lines would go into it."""
    words = ("quantize", tiny[0], tmp_path / "out", "--bits", 3, "--group-size", 32, "--calibration", tiny[2],
             "--samples", 4, "--seqlen", 40, "--max-loss", limit)  # fmt: skip
    assert ended(words, streams)[0] == expected
    assert nearplane.verify(tmp_path / "out").faults == ()
    assert read_record(tmp_path / "out").files == read_record(tiny[1]).files


def test_generate_stops_with_141_once_nobody_reads_it():
    code, out, err = ended(("generate", MODEL, "Return the number of", "--tokens", 400), {1: "unread"})
    assert (code, out) == (141, "")
    assert err == f"opening {MODEL} (torch is loaded first)\n"
