"""Training of a checkpoint against the predictions of the original model, KL(original || quantized)."""
