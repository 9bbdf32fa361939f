"""Training programs of others, unedited, plain and under `qkeel watch`: `make programs` writes their page."""
