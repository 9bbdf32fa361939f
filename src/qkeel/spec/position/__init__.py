"""The position slot: one family of positions a file."""
