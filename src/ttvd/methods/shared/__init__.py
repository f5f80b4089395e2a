"""Pieces that several methods share: losses, memories, augmentations, random numbers."""
