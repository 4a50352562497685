"""Tasks of lm-eval from local files; `make test-eval` installs lm-eval and runs these tests."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nearplane
from checkpoints import save_part_of_the_demo, write_folder
from nearplane.cli import app as cli
from nearplane.demo import HELD_OUT

pytest.importorskip("lm_eval", reason="needs lm_eval")

CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices\nmetric_list: [{metric: acc}, {metric: acc_norm}]"
TASKS: dict[str, tuple[int, str, str]] = {  # number of documents, the right answer, and the kind of task
    "which": (24, "answer", CHOICE),
    "which_again": (8, "answer", CHOICE),
    "next": (
        6,
        "{{choices[answer]}}",
        "output_type: generate_until\ngeneration_kwargs: {max_gen_toks: 4, until: [' ']}",
    ),
    "words": (6, "context", "output_type: loglikelihood_rolling\nmetric_list: [{metric: word_perplexity}]"),
}
GROUP = "group: both\ntask: [which, which_again]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
NAMES = ["which", "next", "words"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a part of the demo model, and the same rounded to 2 bits."""
    original = save_part_of_the_demo(tmp_path_factory.mktemp("models") / "original", own_head=True)
    out = original.with_name("out")
    write_folder(out, original, "compressed-tensors", bits=2, group_size=32)
    return original, out


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of tasks: the next word among four, the same by generation, perplexity, and a group of tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    words, draw = HELD_OUT.read_text().split(), random.Random(0)
    for name, (documents, target, kind) in TASKS.items():
        rows = []
        for start in range(0, 40 * documents, 40):
            choices, answer = draw.sample(words, 4), draw.randrange(4)
            choices[answer] = words[start + 20]
            rows.append({"context": " ".join(words[start : start + 20]), "choices": choices, "answer": answer})
        file = folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        text = '""' if name == "words" else "context"
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {json.dumps(str(file))}}}}}\n"
            f"test_split: test\ndoc_to_text: {text}\ndoc_to_target: {json.dumps(target)}\n{kind}\n"
        )
    (folder / "both.yaml").write_text(GROUP)
    return folder


def by_lm_eval(model: Path, tasks: Path, out: Path, patch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[Any]]:
    """Run lm-eval's own command line; return its results, and what it logs of each document of the first task."""
    from lm_eval.__main__ import cli_evaluate

    patch.setattr("sys.argv", ["lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32",
                               "--device", "cpu", "--include_path", str(tasks), "--tasks", ",".join(NAMES), "--batch_size", "8",
                               "--output_path", str(out), "--log_samples"])  # fmt: skip
    cli_evaluate()
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    samples = next(out.rglob("samples_which_*.jsonl")).read_text().splitlines()
    return results, [json.loads(line)["acc"] for line in samples]


def test_scores_are_those_of_lm_evals_own_command_line(models, tasks, tmp_path, monkeypatch):
    """Values and errors are compared, and the paired difference with what its log of each document gives."""
    original, out = models
    scores = nearplane.evaluate_tasks(out, NAMES, against=original, task_path=tasks)
    results, right = by_lm_eval(out, tasks, tmp_path / "out", monkeypatch)
    original_results, original_right = by_lm_eval(original, tasks, tmp_path / "original", monkeypatch)
    assert {score.metric for score in scores} == {"acc", "acc_norm", "exact_match", "word_perplexity"}
    for score in scores:
        value, error = f"{score.metric},{score.filter}", f"{score.metric}_stderr,{score.filter}"
        assert score.value == pytest.approx(results[score.task][value], rel=1e-5)
        assert score.original == pytest.approx(original_results[score.task][value], rel=1e-5)
        theirs = results[score.task][error]
        assert score.error == (None if theirs == "N/A" else pytest.approx(theirs))
        assert score.difference_error is not None
    score = scores[0]
    differences = [ours - theirs for ours, theirs in zip(right, original_right, strict=True)]
    assert (score.right_to_wrong, score.wrong_to_right) == (differences.count(-1), differences.count(1))
    mean = sum(differences) / 24
    assert score.difference == pytest.approx(mean)
    assert score.difference_error == pytest.approx(math.sqrt(sum((d - mean) ** 2 for d in differences) / 23 / 24))


def test_a_group_is_the_mean_of_its_tasks(models, tasks, monkeypatch, capsys):
    original, out = models
    words = ("evaluate", out, "--against", original, "--tasks", "which,both", "--task-path", tasks, "--json")
    monkeypatch.setattr("sys.argv", ["nearplane", *map(str, words)])
    with suppress(SystemExit):
        cli.main()
    scores = {each["task"]: each for each in json.loads(capsys.readouterr().out)["tasks"] if each["metric"] == "acc"}
    one, other, both = (scores[name] for name in ("which", "which_again", "both"))
    assert both["documents"] == 32
    assert both["difference"] == pytest.approx((24 * one["difference"] + 8 * other["difference"]) / 32)
    assert both["difference_error"] == pytest.approx(
        math.hypot(24 * one["difference_error"], 8 * other["difference_error"]) / 32
    )
    assert both["right_to_wrong"] == one["right_to_wrong"] + other["right_to_wrong"]


def test_what_cannot_be_asked_is_refused_before_the_model_is_loaded(models, tasks, tmp_path, monkeypatch):
    """The folder of the model holds a config only."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    with pytest.raises(nearplane.RecipeError, match="--tasks whihc: lm-eval has no task of this name"):
        nearplane.evaluate_tasks(tmp_path, ["whihc"], task_path=tasks)
    (tasks / "lost.yaml").write_text((tasks / "which.yaml").read_text().replace("which", "lost"))
    with pytest.raises(nearplane.CalibrationError, match=r"The task lost cannot be loaded .*lost.jsonl"):
        nearplane.evaluate_tasks(tmp_path, ["lost"], task_path=tasks)
    with pytest.raises(nearplane.ModelError, match="safetensors"):
        nearplane.evaluate_tasks(tmp_path, ["which"], task_path=tasks)
