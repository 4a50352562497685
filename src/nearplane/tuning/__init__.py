"""Training a finished checkpoint on KL(original || quantized)."""
