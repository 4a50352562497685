"""Entropy coding of integer matrices to bytes and back, independent of grids, files and models."""
