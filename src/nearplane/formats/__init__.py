"""Layers and checkpoints as bytes on disk, one file per format."""
