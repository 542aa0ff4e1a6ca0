"""Callback plugins, one a file."""
