"""Checkpoints, their cards, and the sites of a model."""
