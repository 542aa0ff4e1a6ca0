"""Arithmetic of a training plan: memory, communication, time, cost, layouts. Standard library and numpy only."""
