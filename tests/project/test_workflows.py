"""What runs on the host of the repository: workflows call targets that the Makefile has, on the versions that are claimed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
HOST = ROOT / ".github"
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in (HOST / "workflows").glob("*.yml")}


def test_every_form_and_workflow_can_be_parsed() -> None:
    assert WORKFLOWS.keys() == {"test.yml", "nightly.yml", "release.yml"}
    for path in HOST.rglob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path


def test_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.M))
    steps = [step for each in WORKFLOWS.values() for job in each["jobs"].values() for step in job["steps"]]
    parts = WORKFLOWS["nightly.yml"]["jobs"]["nightly"]["strategy"]["matrix"]["part"]
    called = {target for step in steps for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.M)}
    assert called - {"nightly-"} <= targets
    assert re.search(r"^nightly: (.*)$", MAKEFILE, re.M)[1].split() == [f"nightly-{part}" for part in parts]


def test_the_versions_of_python_are_those_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    run = WORKFLOWS["test.yml"]["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert run == claimed
    assert project["requires-python"] == f">={claimed[0]}"
