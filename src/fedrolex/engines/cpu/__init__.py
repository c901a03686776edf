"""Engines for a CPU."""
