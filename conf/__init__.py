"""Configurations: YAML files by kind."""
