"""Embedded recipes, one YAML file each."""
