"""From a configuration to a model and its optimizer."""
