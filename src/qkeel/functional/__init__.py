"""Every formula once: torch in, torch out, no state."""
