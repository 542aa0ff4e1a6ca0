"""Strategies by registry name: ddp, fsdp, hsdp, zero1, zero2, zero3."""
