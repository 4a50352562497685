"""Programs that load what a run writes: what config.json must tell them, and whether they will load it, known before the run."""
