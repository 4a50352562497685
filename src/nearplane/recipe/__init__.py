"""What is asked of a run: recipe, schemes, other tools' names for options."""
