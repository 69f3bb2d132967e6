"""Photographs of any size: mosaics of the quickstart ones, with grain, as PNG files."""

from pathlib import Path

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
TILE = 360  # pixels; every photograph is larger
GRAIN = 1.5  # standard deviation; with it a PNG takes about half of the raw bytes


def photograph(number: int, width: int, height: int) -> np.ndarray:
    """A mosaic (height, width, 3) BGR uint8, the same each time for the same ``number``."""
    rng = np.random.default_rng(number)
    files = sorted((ROOT / 'datasets/quickstart/train/gt').glob('*.png'))
    mosaic = rng.normal(0, GRAIN, (height, width, 3))
    for top in range(0, height, TILE):
        for left in range(0, width, TILE):
            img = cv2.imread(str(files[rng.integers(len(files))]))
            y, x = rng.integers(img.shape[0] - TILE), rng.integers(img.shape[1] - TILE)
            place = mosaic[top : top + TILE, left : left + TILE]
            place += img[y : y + place.shape[0], x : x + place.shape[1]]
    return mosaic.round().clip(0, 255).astype(np.uint8)


def photo_pairs(folder: Path, width: int, height: int, count: int) -> tuple[Path, Path]:
    """Folders of ``count`` photographs and of their quarter-size versions, made if not there."""
    gt, lq = (folder / f'{width}x{height}' / name for name in ('gt', 'lq'))
    for part in (gt, lq):
        part.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        name = f'{number:04d}.png'
        if not (lq / name).exists():
            img = photograph(number, width, height)
            small = cv2.resize(img, (width // 4, height // 4), interpolation=cv2.INTER_AREA)
            cv2.imwrite(str(gt / name), img)
            cv2.imwrite(str(lq / name), small)
    return gt, lq
