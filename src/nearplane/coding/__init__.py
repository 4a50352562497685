"""Integers to bytes and back. Knows no grids, files or models."""
