"""The command line of nearplane: it parses flags and prints results. torch is imported only when a command runs."""
