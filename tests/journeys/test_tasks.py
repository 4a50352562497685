"""Tasks of lm-eval, from local files: its own command line gives the same numbers; `make test-eval` installs it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import nearplane
from checkpoints import save_part_of_the_demo, write_folder
from nearplane.demo import HELD_OUT

pytest.importorskip("lm_eval", reason="needs lm_eval")

KINDS = {
    "which": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\nmetric_list:\n  - {metric: acc}\n  - {metric: acc_norm}",
    "first_word": "output_type: generate_until\ndoc_to_target: \"{{choices[answer].split(' ')[0]}}\"\ngeneration_kwargs: {max_gen_toks: 4, until: [' ']}\n"
    "metric_list:\n  - {metric: exact_match}",
    "words": "output_type: loglikelihood_rolling\ndoc_to_target: context\nmetric_list:\n  - {metric: word_perplexity}",
}
GROUP = """group: both
task: [which, which_again]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a part of the demo model, and the same rounded to 2 bits."""
    original = save_part_of_the_demo(tmp_path_factory.mktemp("models") / "original")
    out = original.with_name("out")
    write_folder(out, original, "compressed-tensors", bits=2, group_size=32)
    return original, out


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks: the word that follows, among four; the same by generation; perplexity; a group."""
    folder = tmp_path_factory.mktemp("tasks")
    words, draw = HELD_OUT.read_text().split(), random.Random(0)
    for name, documents in (("which", 24), ("which_again", 8), ("first_word", 6), ("words", 6)):
        file = folder / f"{name}.jsonl"
        with file.open("w") as rows:
            for start in range(0, 40 * documents, 40):
                choices = [words[start + 20], *draw.sample(words, 3)]
                answer = draw.randrange(4)
                choices[0], choices[answer] = choices[answer], choices[0]
                row = {"context": " ".join(words[start : start + 20]), "choices": choices, "answer": answer}
                rows.write(f"{json.dumps(row)}\n")
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {json.dumps(str(file))}}}}}\n"
            f"test_split: test\ndoc_to_text: {'context' if name != 'words' else chr(39) * 2}\n{KINDS[name.removesuffix('_again')]}\n"
        )
    (folder / "both.yaml").write_text(GROUP)
    return folder


def test_scores_are_those_of_lm_evals_own_command_line(models, tasks, tmp_path, capsys, monkeypatch):
    from lm_eval.__main__ import cli_evaluate

    original, out = models
    ours = {}
    for score in nearplane.evaluate_tasks(out, ["which", "first_word", "words"], against=original, task_path=tasks):
        ours[score.task, score.metric] = score
    for model, field in ((out, "value"), (original, "original")):
        words = ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--device", "cpu",
                 "--include_path", tasks, "--tasks", "which,first_word,words", "--batch_size", 8, "--output_path", tmp_path / field]  # fmt: skip
        monkeypatch.setattr("sys.argv", [*map(str, words)])
        cli_evaluate()
        capsys.readouterr()
        written = json.loads(next((tmp_path / field).rglob("results_*.json")).read_text())["results"]
        for (task, metric), score in ours.items():
            assert getattr(score, field) == pytest.approx(written[task][f"{metric},none"], rel=1e-6)
            error = score.error if field == "value" else score.original_error
            by_lm_eval = written[task][f"{metric}_stderr,none"]
            assert error == (None if by_lm_eval == "N/A" else pytest.approx(by_lm_eval, rel=1e-9))
    assert {metric for _, metric in ours} == {"acc", "acc_norm", "exact_match", "word_perplexity"}
