"""HTML that is escaped by construction, numbers as people write them, and the frame of every page."""
