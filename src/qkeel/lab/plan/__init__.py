"""The runs of a study: a product of options, as a list of runs."""
