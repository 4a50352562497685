"""The command line: flags in, text out. torch is imported only when a command runs."""
