"""One run on several processes writes the same bytes as one process, ends as a whole, and is resumed on any number."""

import math
import os
import random
import re
import signal
import socket
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import nearplane
from children import Child
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents
from nearplane.calibration import activations
from nearplane.cli import app
from nearplane.demo import CALIBRATION
from nearplane.errors import CalibrationError, NearplaneError, RankError
from nearplane.lattice import kernels
from nearplane.system import process_group
from nearplane.system.progress import peak_memory
from nearplane.verbs.follow import on_all_ranks
from nightly import daily
from several import all_well, begun, free_port, on_ranks

STRIP_ROWS = kernels.CPU.strip_rows  # before tests make it smaller
GRID = dict(bits=4, group_size=16)
WAYS = {
    "grid": GRID,
    "rate, embeddings and head": dict(rate=3.0, include_embeddings=True, include_head=True),
    "experts": GRID,
    "size": dict(size="258kB"),
    "widths by slope": dict(bits=3, group_size=16, allocate="slope", symmetric=False, format="gptq_v2"),
    "blocks of llama.cpp": dict(grid="q4_0"),
    "a mix of formats": dict(mix="int3,int4,int8,bf16", bits_per_weight=7, group_size=16),
    "inputs in 8 bits, scales of the cache": dict(grid="int8", activations="int8", kv_cache="fp8"),
    "inputs in 4 bits": dict(grid="nvfp4", activations="fp4"),
    "experts at a rate": dict(rate=3.0),
    "a stage at a time": dict(**GRID, true_sequential=False),
    "one network": dict(**GRID, correct=False),
    "rounded to nearest": dict(**GRID, solver="round-to-nearest"),
}
TEXT = dict(samples=14, seqlen=32, device="cpu")
MOMENTS = 20  # at which a rank is killed; one of them in `make test`


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folders = {}
    for name, family in (("dense", "llama"), ("experts", "mixtral")):
        folders[name] = tmp_path_factory.mktemp("models") / name
        config = config_of(family, vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, tie_word_embeddings=False)
        random_model(config).float().save_pretrained(folders[name])
        add_tokenizer(folders[name])
    return folders


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(CALIBRATION.read_text()[:30000])
    return path


@pytest.fixture(autouse=True, scope="module")
def every_block_and_short_strips():
    """Keep every block, however quick it is, and divide layers of a few rows, as larger ones are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nearplane.formats.journal_pages.MAX_JOURNAL_SHARE", math.inf)
        patch.setattr(kernels, "CPU", replace(kernels.CPU, strip_rows=16))
        yield


@pytest.fixture(scope="module")
def whole(models, text, tmp_path_factory):
    """Return a function from a key of WAYS to the folder that one process writes."""
    made = {}

    def of(way):
        if way not in made:
            made[way] = tmp_path_factory.mktemp("whole") / "out"
            nearplane.quantize(model_of(models, way), made[way], calibration=text, **WAYS[way], **TEXT)
        return made[way]

    return of


def model_of(models, way):
    return models["experts" if way.startswith("experts") else "dense"]


def quantizing(models, way, out, text):
    """Return a function that quantizes on a rank and prints the sentence of an error."""

    def run(rank):
        try:
            record = nearplane.quantize(model_of(models, way), out, calibration=text, **WAYS[way], **TEXT)
            print(len(record.layers))
            assert not rank or record.peak_memory > peak_memory(), "the record has the memory of all ranks"
        except NearplaneError as error:
            print(type(error).__name__, error)
            raise SystemExit(1) from error

    return run


CASES = [(way, world) for way in WAYS for world in (2, 3, 4)]
SHORT = [
    ("a mix of formats", 2),
    ("experts", 2),
    ("rate, embeddings and head", 2),
    ("one network", 2),
]  # ("grid", 2) is the run whose exchanges are counted


@pytest.mark.parametrize("case", daily(CASES, SHORT), ids=str)
def test_any_number_of_ranks_writes_the_same_bytes(models, text, whole, tmp_path, case):
    way, world = case
    ended = on_ranks(world, quantizing(models, way, tmp_path / "out", text))
    all_well(ended)
    assert len({printed for _, printed, _ in ended}) == 1, "every rank has the record"
    assert contents(tmp_path / "out") == contents(whole(way))


def exchanging(run, last=math.inf):
    """Return a function that runs on a rank and is killed at exchange number `last`; at the end it prints their number."""

    def counted(rank):
        passed, found = process_group.ProcessGroup._exchange, []

        def noted(group, *words):
            found.append(len(words))
            if len(found) > last:
                os.kill(os.getpid(), signal.SIGKILL)
            passed(group, *words)

        process_group.ProcessGroup._exchange = noted
        run(rank)
        print(len(found))

    return counted


@pytest.fixture(scope="module")
def exchanges(models, text, whole, tmp_path_factory):
    """Return the number of exchanges between two ranks in a run, which writes the bytes of one process."""
    out = tmp_path_factory.mktemp("counted") / "out"
    ended = on_ranks(2, exchanging(quantizing(models, "grid", out, text)))
    all_well(ended)
    assert contents(out) == contents(whole("grid"))
    return int(ended[1][1].split()[-1])


@pytest.mark.parametrize("number", daily([*range(MOMENTS)], [0]))
def test_a_killed_rank_ends_all_and_another_number_goes_on(models, text, whole, exchanges, tmp_path, number):
    out, world = tmp_path / "out", 2 + number % 2
    victim, moment = number // 2 % world, random.Random(number).randrange(exchanges)
    run = quantizing(models, "grid", out, text)
    began = time.monotonic()
    ended = on_ranks(world, lambda rank: exchanging(run, moment if rank == victim else math.inf)(rank))
    assert ended[victim][0] == -signal.SIGKILL, f"killed at exchange {moment} of {exchanges}"
    assert time.monotonic() - began < 60, "from the start"
    for rank, (code, printed, _) in enumerate(ended):
        if rank != victim:
            named = rf"RankError Rank {victim} \(process \d+ on .+\)(, through which all are connected,| was killed)"
            assert (code, bool(re.match(named, printed))) == (1, True), printed
    all_well(on_ranks(5 - world, run))
    assert contents(out) == contents(whole("grid"))


def test_an_error_on_one_rank_is_the_sentence_of_all(models, text, tmp_path):
    run = quantizing(models, "grid", tmp_path / "out", text)

    def failing(rank):
        if rank == 1:
            check = activations.Stream.check

            def checked(stream, block):
                if block.name.endswith("1"):
                    raise CalibrationError("a block of one rank is not finite.")
                check(stream, block)

            activations.Stream.check = checked
        run(rank)

    first, second = on_ranks(2, failing)
    assert second[:2] == (1, "CalibrationError a block of one rank is not finite.\n")
    assert first[0] == 1
    assert re.fullmatch(
        r"RankError Rank 1 \(process \d+ on .+\) failed: a block of one rank is not finite\.\n", first[1]
    )


@pytest.mark.parametrize("what", ["recipe", "model", "version of nearplane"])
def test_ranks_that_would_not_compute_the_same_are_refused_by_name(models, text, tmp_path, monkeypatch, what):
    def run(rank):
        way = "grid"
        if rank == 1 and what == "recipe":
            way = "rounded to nearest"
        if rank == 1 and what == "model":
            way = "experts"
        if rank == 1 and what.startswith("version"):
            from nearplane.verbs import follow

            found = follow.versions()
            follow.versions = lambda: found | {"nearplane": "0.0.1"}
        quantizing(models, way, tmp_path / "out", text)(rank)

    ended = on_ranks(2, run)
    for code, printed, _ in ended:
        assert code == 1
        assert re.search(rf"Rank 1 has another {what}( \(\w+\))? than rank 0", printed)
    assert not (tmp_path / "out").exists()


def test_a_rank_that_never_arrives_is_named(monkeypatch):
    monkeypatch.setattr(process_group, "ARRIVAL", 1.0)

    def run(rank):
        if rank == 2:
            return
        with on_all_ranks():
            print("never")

    first, second, _ = on_ranks(3, lambda rank: printed_error(run, rank))
    assert all("Rank 2 of 3 did not arrive within 1 seconds" in each[1] for each in (first, second))


def test_a_port_in_use_is_named():
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()

        def run(rank):
            with on_all_ranks():
                print("never")

        children = begun(2, lambda rank: printed_error(run, rank) if rank == 0 else None, port)
        (_, printed, _), _ = (child.ended() for child in children)
    assert f"Rank 0 cannot listen at 127.0.0.1:{port} (the address is already in use)" in printed


def printed_error(run, rank):
    try:
        run(rank)
    except RankError as error:
        print(error)
        raise SystemExit(1) from error


def test_a_group_that_the_program_made_is_used_and_left(models, text, whole, tmp_path):
    run = quantizing(models, "grid", tmp_path / "out", text)

    def within(rank):
        dist.init_process_group("gloo")
        run(rank)
        total = torch.ones(1)
        dist.all_reduce(total)
        print(int(total))
        dist.destroy_process_group()

    ended = on_ranks(2, within)
    all_well(ended)
    assert all(printed.split()[-1] == "2" for _, printed, _ in ended)
    assert contents(tmp_path / "out") == contents(whole("grid"))


def test_a_busy_rank_is_not_taken_for_a_dead_one(monkeypatch):
    from nearplane.system import heartbeat

    for name, seconds in (("LOST", 2.0), ("BEAT", 0.5), ("LOOK", 0.2)):
        monkeypatch.setattr(heartbeat, name, seconds)

    def run(rank):
        with on_all_ranks() as ranks:
            if rank == 1:
                until = time.monotonic() + 3
                while time.monotonic() < until:
                    pass  # with the interpreter's lock, as a compiler that is busy
            print(ranks.gather(rank))

    ended = on_ranks(2, run)
    assert [each[:2] for each in ended] == [(0, "[0, 1]\n")] * 2


def test_a_silent_rank_is_named(monkeypatch):
    from nearplane.system import heartbeat

    monkeypatch.setattr(heartbeat, "LOST", 3.0)

    def run(rank):
        with on_all_ranks() as ranks:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)  # as a machine that is gone
            ranks.gather(rank)

    children = begun(2, lambda rank: printed_error(run, rank))
    _, printed, _ = children[0].ended()
    children[1].send(signal.SIGKILL)
    children[1].ended()
    assert re.match(r"Rank 1 \(process \d+ on .+\) has given no sign of life for 3 seconds", printed)


def command_line(model, out, text, *more):
    """Run the command line in this process."""
    words = ["quantize", model, out, "--bits", 4, "--group-size", 16, "--calibration", text, "--device", "cpu"]
    words += ["--samples", TEXT["samples"], "--seqlen", TEXT["seqlen"], *more]
    sys.argv = ["nearplane", *map(str, words)]
    app.main()


def test_ranks_of_the_command_line_have_one_voice(models, text, whole, tmp_path):
    ended = on_ranks(2, lambda rank: command_line(models["dense"], tmp_path / "out", text))
    all_well(ended)
    assert [printed.count("layers quantized to") for _, printed, _ in ended] == [1, 0]
    assert [said.count("opening") for _, _, said in ended] == [1, 0]
    assert contents(tmp_path / "out") == contents(whole("grid"))


@pytest.mark.nightly
def test_processes_of_the_command_line(models, text, tmp_path, monkeypatch):
    monkeypatch.setattr(
        kernels, "CPU", replace(kernels.CPU, strip_rows=STRIP_ROWS)
    )  # as in processes that the command starts
    out, alone = tmp_path / "out", tmp_path / "alone"
    nearplane.quantize(models["dense"], alone, calibration=text, **GRID, **TEXT)
    code, printed, said = Child(lambda: command_line(models["dense"], out, text, "--processes", 2)).ended()
    assert code == 0, said
    assert printed.count("layers quantized to") == 1
    assert said.count("opening") == 1, "one voice"
    assert contents(out)["layers"] == contents(alone)["layers"]


def test_evaluate_and_verify_give_the_same_numbers(models, text, whole, tmp_path):
    folder = whole("grid")
    held = tmp_path / "held.txt"
    held.write_text(CALIBRATION.read_text()[30000:34000])

    def measured(rank=0):
        score = nearplane.evaluate(folder, held, against=models["dense"], seqlen=40, device="cpu")
        checked = nearplane.verify(folder, against=models["dense"], calibration=text, tolerance=0.0, device="cpu")
        print(score, checked.faults, checked.measured)

    alone = Child(measured).ended()
    assert alone[0] == 0, alone[2]
    assert "() True" in alone[1]
    ended = on_ranks(2, measured)
    all_well(ended)
    assert {printed for _, printed, _ in ended} == {alone[1]}
