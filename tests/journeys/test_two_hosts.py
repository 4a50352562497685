"""A run on two hosts, which are network namespaces of this machine with a cable between them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nearplane
from families import TEXT_VOCABULARY, add_tokenizer, config_of, random_model
from killing import contents
from nearplane.demo import CALIBRATION

OPTIONS = ["--bits", "4", "--group-size", "16", "--samples", "24", "--seqlen", "40", "--device", "cpu"]


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)


@pytest.fixture
def hosts():
    """Make two hosts, 10.89.0.1 and 10.89.0.2, and yield their names."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces are made by ip, of Debian's iproute2, which is not installed")
    names = [f"nearplane-{os.getpid()}-{number}" for number in range(2)]
    made = ip("netns", "add", names[0], check=False)
    if made.returncode:
        pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
    try:
        ip("netns", "add", names[1])
        ends = [f"np{os.getpid()}{letter}"[-15:] for letter in "ab"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.89.0.{number}/24", "dev", end)
            for link in (end, "lo"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


@pytest.mark.nightly
def test_two_hosts_write_the_bytes_of_one(hosts, tmp_path):
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    config = config_of("llama", vocab_size=TEXT_VOCABULARY, num_hidden_layers=2, tie_word_embeddings=False)
    random_model(config).float().save_pretrained(model)
    add_tokenizer(model)
    text.write_text(CALIBRATION.read_text()[:20000])
    words = ["quantize", str(model), str(out), "--calibration", str(text), *OPTIONS]
    source = str(Path(nearplane.__file__).parents[1])
    ranks = []
    for rank, host in enumerate(hosts):
        own = {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "10.89.0.1", "MASTER_PORT": "29500"}
        env = os.environ | own | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        command = ["ip", "netns", "exec", host, sys.executable, "-m", "nearplane", *words]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [line for line in said[1].splitlines() if not line.startswith("[W")] == [], (
        "rank 0 speaks for both"
    )  # torch warns
    nearplane.quantize(
        model, tmp_path / "alone", bits=4, group_size=16, samples=24, seqlen=40, device="cpu", calibration=text
    )
    assert contents(out) == contents(tmp_path / "alone")
