"""Trained runs on longer texts than those of training."""
