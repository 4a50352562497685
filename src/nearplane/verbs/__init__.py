"""What a user does, one file a verb; `quantize.py` is the main path."""
