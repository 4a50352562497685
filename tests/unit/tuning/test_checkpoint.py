"""What tuning reads by default."""

from types import SimpleNamespace

import pytest

from families import config_of, random_model
from nearplane.calibration.windows import samples_of
from nearplane.models.model import open_model
from nearplane.recipe.recipe import Calibration
from nearplane.tuning.checkpoint import samples_to_tune_on


@pytest.mark.parametrize("seqlen", [None, 20])
def test_windows_of_tuning_do_not_depend_on_how_many_the_run_had(tmp_path, seqlen):
    """Five times as many as the run made tuning after a quick run read a quarter of what the same model needs."""
    random_model(config_of("llama")).save_pretrained(tmp_path)
    model = open_model(tmp_path)
    of_runs = [SimpleNamespace(windows=windows, seqlen=40) for windows in (0, 4, 16, 128)]
    assert {samples_to_tune_on(model, record, seqlen) for record in of_runs} == {400 if seqlen is None else 800}
    assert samples_of(model, Calibration(seqlen=40)) == 80  # 50 tokens for each of 64 inputs
