"""Tuning after the solve: stored steps, norm weights and codes trained on KL(original || quantized)."""
