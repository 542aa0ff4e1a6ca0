"""Precision plugins for Lightning."""
