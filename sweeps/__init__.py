"""Ray Tune sweeps, their run tables and the scaling fits made from them."""
