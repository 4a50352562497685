"""One matrix: its target, its codes and its certificate. Knows no models."""
