"""Data sets read from files, and getting those files."""
