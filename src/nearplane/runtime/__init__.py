"""Modules that compute with quantized weights as they lie in memory. Knows no files."""
