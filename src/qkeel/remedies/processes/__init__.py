"""Remedies where several processes train one model: all of them make the same change, or none does."""
