"""Operators that need no build step: every one is made of torch and torchvision calls."""
