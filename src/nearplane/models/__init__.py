"""A transformers network whose weights stay on disk. Knows no lattices."""
