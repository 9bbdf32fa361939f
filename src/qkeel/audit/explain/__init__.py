"""The recipe that each attention of a model really applies, found by experiment."""
