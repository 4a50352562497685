"""Bits of each layer: what a rate or a size leaves them, measured, planned and kept."""
