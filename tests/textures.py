"""Pictures with the statistics of photographs, made of random numbers."""

import numpy as np


def texture(seed, height=256, width=256):
    """An image (h, w, 3) whose spectrum falls as 1 / frequency, as that of photographs."""
    rng = np.random.default_rng(seed)
    radius = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    falloff = 1 / np.maximum(radius, 1 / max(height, width))
    planes = []
    for noise in rng.normal(size=(3, height, width)):
        plane = np.fft.irfft2(np.fft.rfft2(noise) * falloff, (height, width))
        planes.append(plane / plane.std())
    # Colours of a photograph have most of their contrast in common.
    mixed = np.stack([planes[0] + 0.3 * plane for plane in planes], axis=-1)
    return np.clip(128 + 40 * mixed, 0, 255).round().astype(np.uint8)
