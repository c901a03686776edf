"""Engines for one GPU."""
