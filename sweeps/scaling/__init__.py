"""Pure scaling-law fits: numpy and scipy only."""
