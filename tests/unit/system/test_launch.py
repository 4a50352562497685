"""What a process is told by torchrun and SLURM."""

import pytest

from nearplane.errors import RecipeError
from nearplane.system.launch import Launch, first_host, forget_launch, launched

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "node[03-06]",
    "SLURM_JOB_ID": "123456",
}


def test_a_process_alone_was_not_launched_with_others():
    assert launched({}) is None
    assert launched(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None


def test_torchrun_says_rank_and_address():
    assert launched(TORCHRUN) == Launch(1, 4, "a", 29500)


def test_srun_says_rank_and_hosts_and_the_port_follows_from_the_job():
    assert launched(SLURM) == Launch(5, 8, "node03", 20000 + 123456 % 20000)
    assert launched(SLURM | {"MASTER_PORT": "7", "MASTER_ADDR": "b"}) == Launch(5, 8, "b", 7)


def test_a_script_of_sbatch_is_one_process():
    assert launched({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) is None


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(missing):
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(RecipeError, match=missing):
        launched(env)


def test_a_rank_that_is_no_number_is_refused():
    with pytest.raises(RecipeError, match="invalid literal"):
        launched(TORCHRUN | {"RANK": "first"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[007,9],m2", "n007"), ("gpu-a1.site,b", "gpu-a1.site")],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


def test_an_empty_list_of_hosts_is_refused():
    with pytest.raises(ValueError, match="no host"):
        first_host("")


def test_a_command_of_rank_0_alone_knows_of_no_others(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert launched() is not None
    forget_launch()
    assert launched() is None
