"""The commands of nearplane as Python functions, one file per verb; `quantize.py` is the main path."""
