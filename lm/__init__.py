"""The model, its objective, its data and the pure arithmetic about it."""
