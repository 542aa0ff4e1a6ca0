"""Thin command-line mains: data, pretrain, bench, demo."""
