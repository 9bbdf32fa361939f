"""The command line: views of the lab's configuration, progress on the terminal, exit codes."""
