"""Devices, memory, files, locks and progress: what nearplane needs from the machine."""
