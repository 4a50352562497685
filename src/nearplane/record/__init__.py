"""The record of a run: its data, sentences about them, and the HTML report."""
