"""The public names of the package, each where it is at home. A new verb is one line here and one of `HOMES` in `__init__.py`."""

from nearplane.errors import (
    CalibrationError as CalibrationError,
)
from nearplane.errors import (
    FormatError as FormatError,
)
from nearplane.errors import (
    ModelError as ModelError,
)
from nearplane.errors import (
    NearplaneError as NearplaneError,
)
from nearplane.errors import (
    NumericalError as NumericalError,
)
from nearplane.errors import (
    RecipeError as RecipeError,
)
from nearplane.loading.from_pretrained import load as load
from nearplane.loading.from_pretrained import register as register
from nearplane.matrix.quantize_matrix import quantize_matrix as quantize_matrix
from nearplane.matrix.quantize_matrix import quantize_matrix_to_rate as quantize_matrix_to_rate
from nearplane.recipe.block_scheme import BlockScheme as BlockScheme
from nearplane.recipe.layer_scheme import LayerScheme as LayerScheme
from nearplane.recipe.rate_scheme import RateScheme as RateScheme
from nearplane.recipe.recipe import Calibration as Calibration
from nearplane.recipe.recipe import Recipe as Recipe
from nearplane.recipe.schemes import GridScheme as GridScheme
from nearplane.record.record_file import read_record as read_record
from nearplane.verbs.auto import auto as auto
from nearplane.verbs.card import card as card
from nearplane.verbs.compare import compare as compare
from nearplane.verbs.evaluate import evaluate as evaluate
from nearplane.verbs.evaluate_chat import evaluate_chat as evaluate_chat
from nearplane.verbs.evaluate_tasks import evaluate_tasks as evaluate_tasks
from nearplane.verbs.export import export as export
from nearplane.verbs.frontier import frontier as frontier
from nearplane.verbs.generate import generate as generate
from nearplane.verbs.preview import preview as preview
from nearplane.verbs.quantize import quantize as quantize
from nearplane.verbs.report import write_report as write_report
from nearplane.verbs.rotate import rotate as rotate
from nearplane.verbs.suggest import suggest as suggest
from nearplane.verbs.tune import tune as tune
from nearplane.verbs.verify import verify as verify

__version__: str
