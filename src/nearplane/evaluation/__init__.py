"""What networks predict, and how it is scored: predictions, protocols of perplexity, statistics, scores of tasks."""
