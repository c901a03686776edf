"""Recipes: runs described in full; the package's own are YAML files beside this one."""
