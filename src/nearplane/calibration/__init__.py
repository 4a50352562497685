"""From text to second moments: tokens, hidden states block by block, and the walk through a network."""
