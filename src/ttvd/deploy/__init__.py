"""Deployment: a model and its sites in, a stream of images through, predictions and a state out."""
