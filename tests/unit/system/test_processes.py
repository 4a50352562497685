"""How the other processes of a run are started and ended."""

import pytest

from nearplane.errors import RecipeError
from nearplane.system import processes
from nearplane.system.launch import Launch, launched
from nearplane.system.processes import started, without_processes

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def test_the_other_processes_do_not_start_processes():
    words = ["quantize", "m", "out", "--processes", "2", "--bits", "4"]
    assert without_processes(words) == ["quantize", "m", "out", "--bits", "4"]
    assert without_processes(["quantize", "--processes=3", "m"]) == ["quantize", "m"]


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    with pytest.raises(RecipeError, match="--processes is 0"), started(0):
        pass
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="rank 1 of 4"), started(2):
        pass


def test_a_process_that_is_left_is_ended(monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.1)
    with started(2, ["sleep", "100"]):
        assert launched() == Launch(0, 2, "127.0.0.1", launched().port)
    assert launched() is None
