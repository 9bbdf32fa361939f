"""The ladder: what 131,000 parameters show, asked again at one, ten and 124 million by rules older than its runs."""
