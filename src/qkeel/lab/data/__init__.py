"""Sources of texts and images, and batches that are a function of (seed, step)."""
