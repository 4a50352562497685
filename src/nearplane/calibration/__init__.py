"""Calibration: text to windows, the walk of activations through a network, and second moments of layer inputs."""
