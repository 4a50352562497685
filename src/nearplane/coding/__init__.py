"""Pure bits: integers in, bytes out. Knows no grids, files or models."""
