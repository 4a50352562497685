"""What can go wrong, by cause. Every message says what was found, what was expected and what to do."""


class NearplaneError(Exception):
    """Base of all errors that nearplane raises on purpose; the command line prints its message and exits with 1."""


class RecipeError(NearplaneError):
    """The recipe asks for something that does not exist or that the chosen format cannot hold."""


class ModelError(NearplaneError):
    """The model cannot be found, read or taken apart into blocks and layers."""


class CalibrationError(NearplaneError):
    """The calibration text is missing, empty, too short, or makes the network produce NaN or Inf."""


class NumericalError(NearplaneError):
    """A matrix is not finite or not positive definite."""


class FormatError(NearplaneError):
    """A file on disk is not what its format says."""


def first_line(error: Exception) -> str:
    """Return the first line of what another library's error says, or its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
