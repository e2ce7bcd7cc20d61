"""Backbones, and the plans that the paper has for them."""
