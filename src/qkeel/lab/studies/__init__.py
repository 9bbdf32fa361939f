"""Studies, one a file: a Study each, which the table in lab.execution.execute names."""
