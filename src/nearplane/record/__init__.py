"""What was measured of a run: the data, sentences about it, and the HTML page."""
