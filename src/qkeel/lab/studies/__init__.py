"""Studies, one file each: from a base configuration and a grid to a plan."""
