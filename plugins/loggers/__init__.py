"""Experiment loggers."""
