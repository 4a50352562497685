"""Models of transformers whose weights stay on disk: blocks, layers, experts and the conversion of names."""
