"""The page of a watched model."""
