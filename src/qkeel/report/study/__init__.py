"""The page about a study or about single runs of the lab."""
