"""The HTML page of a run, made from its record alone."""
