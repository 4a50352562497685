"""The real client: llama.cpp's own server on our GGUF files, asked by OpenAI's own client, as a person would do it.

Needs xllamacpp, a build of llama.cpp with its server, in an environment of its own (`make test-llama-server`), and SmolLM2 of
tools/published_models.py, which has a chat template. Written for xllamacpp 2026.10.11549.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from written_folders import SMOLLM2, Written, needs_project, needs_smollm2, written

xllamacpp = pytest.importorskip("xllamacpp", reason="needs xllamacpp")
openai = pytest.importorskip("openai", reason="needs openai")
pytestmark = [pytest.mark.nightly, needs_project, needs_smollm2]
GRIDS = ("q8_0", "q4_0", "q4_k_m")
QUESTION = [{"role": "user", "content": "Name three colours of the rainbow."}]
CLOSE = 0.15  # nats, of log-probabilities in the mean: it rounds the inputs of layers to 8 bits; q8_0 differs by 0.08


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    return written({grid: {"grid": grid} for grid in GRIDS}, tmp_path_factory.mktemp("folders"), source=SMOLLM2)


@pytest.fixture(scope="module", params=GRIDS)
def served(request: pytest.FixtureRequest, folders: dict[str, Written]) -> Iterator[tuple[str, Path, Any]]:
    """Start a server of one file, and yield its type, its folder and a client."""
    folder, options = folders[request.param].folder, xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel = str(folder / "model.gguf"), 512, 1
    options.cpuparams.n_threads = 1
    server = xllamacpp.Server(options)
    yield request.param, folder, openai.OpenAI(base_url=f"{server.listening_address}/v1", api_key="none", timeout=600)
    del server


def test_a_client_chats_streams_stops_and_gets_our_log_probabilities(
    served: tuple[str, Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    grid, folder, client = served
    ask: dict[str, Any] = dict(model="ours", messages=QUESTION, temperature=0, max_tokens=24)
    first = client.chat.completions.create(**ask, logprobs=True, top_logprobs=5).choices[0]
    answer, given = first.message.content, first.logprobs.content
    assert len(answer.split()) > 3

    pieces = [
        each.choices[0].delta.content or ""
        for each in client.chat.completions.create(**ask, stream=True)
        if each.choices
    ]
    assert len(pieces) > 8
    assert "".join(pieces) == answer

    word = answer.split()[3]
    stopped = client.chat.completions.create(**ask, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == answer[: answer.index(word)]

    transformers = pytest.importorskip("transformers", reason="needs transformers, which tokenizes as the original")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    tokens = [*before, *(each.id for each in given)]
    own, original = (
        written({"served": {}}, tmp_path_factory.mktemp("predicted"), source=source, tokens=tokens)["served"].predicted
        for source in (folder, SMOLLM2)
    )

    def distance(predicted: Any) -> float:
        """Return the mean difference from what the server predicted."""
        found = [
            abs(top.logprob - predicted[len(before) - 1 + at, top.id])
            for at, each in enumerate(given)
            for top in each.top_logprobs
        ]
        assert len(found) == 5 * len(given)
        return float(sum(found) / len(found))

    assert distance(own) < CLOSE
    assert grid == "q8_0" or distance(own) < distance(original) / 2  # it computes with the values of the file
