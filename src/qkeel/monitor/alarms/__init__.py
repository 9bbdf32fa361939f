"""Rules on recorded numbers that raise alarms, with their thresholds and the forecast they use."""
