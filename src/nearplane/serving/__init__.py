"""Entropy-coded checkpoints in servers: what their plugins are made of. No other folder imports this one."""
