"""Engines run the client work of one cohort; they know nothing of methods."""
