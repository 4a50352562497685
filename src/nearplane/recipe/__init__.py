"""Recipe of a run: its options, the schemes, and other tools' names of options."""
