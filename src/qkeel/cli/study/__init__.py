"""`qkeel study` and `qkeel demo`: many runs, one table and one report; one file per study."""
