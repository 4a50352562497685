"""Patterns of --ignore: one that names nothing is refused, with names that are like it."""

import pytest

from families import config_of, random_model
from nearplane import RecipeError
from nearplane.models.ignored import refuse_unmatched
from nearplane.models.model import open_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    random_model(config_of("llama")).save_pretrained(folder)
    return open_model(str(folder))


@pytest.mark.parametrize(
    "pattern", ["lm_head", r"layers\.0\.", "q_proj$", "embed_tokens", "norm", "^model.layers.1.mlp"]
)
def test_what_has_weights_may_be_named_quantized_or_not(model, pattern):
    refuse_unmatched(model, [pattern])


@pytest.mark.parametrize(
    ("pattern", "near"),
    [("q_porj", "q_proj"), ("lm_haed$", "lm_head"), (r"model\.layer\.0\.mlp\.up_proj", "model.layers.0.mlp.up_proj")],
)
def test_a_pattern_that_names_nothing_is_refused_with_names_like_it(model, pattern, near):
    with pytest.raises(RecipeError) as error:
        refuse_unmatched(model, ["lm_head", pattern])
    assert f"--ignore {pattern} matches no layer" in str(error.value)
    assert near in str(error.value)


def test_a_scheme_for_layers_that_are_not_quantized_is_refused(model):
    refuse_unmatched(model, ["down_proj"], "--layer")
    with pytest.raises(RecipeError, match=r"--layer lm_head matches no layer"):
        refuse_unmatched(model, ["lm_head"], "--layer")


@pytest.mark.parametrize("pattern", ["mlp$", "layers.9", "Linear"])
def test_a_pattern_of_modules_without_weights_of_their_own_is_refused(model, pattern):
    """`mlp$` is found in the name of a module and leaves nothing as it is."""
    with pytest.raises(RecipeError, match=r"such as model\.layers\.0\.self_attn\.q_proj"):
        refuse_unmatched(model, [pattern])
