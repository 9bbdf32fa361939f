"""The page of a study, or of single runs of the lab."""
