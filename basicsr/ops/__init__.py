"""Operators without a build step, implemented with torch and torchvision."""
