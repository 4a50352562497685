"""One matrix: its target, its codes and its certificate. Independent of models."""
