"""transformers plumbing: modules, files and tokens. Knows nothing of lattices: a Hessian is a plain tensor here."""
