"""Training programs of others, unedited, plain and under `qkeel watch`."""
