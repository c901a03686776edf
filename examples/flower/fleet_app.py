"""Recipes of the package on real devices; the run-config in pyproject.toml says which."""

from fedrolex.flower import client_app, server_app

client = client_app()
server = server_app()
