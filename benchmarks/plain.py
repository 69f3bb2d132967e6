"""The other side: loading and training in plain NumPy, OpenCV and PyTorch."""

import random
import time
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from basicsr.archs import build_network

NETWORK = {'type': 'SRVGGNetCompact', 'num_feat': 32, 'num_conv': 8, 'upscale': 4}
GT_SIZE, SCALE = 128, 4
LR = 1e-3


class DecodedPairs(Dataset):
    """Decodes both whole images for every sample, and makes floats of all their pixels."""

    def __init__(self, gt_folder: Path, lq_folder: Path):
        self.gt, self.lq = sorted(gt_folder.iterdir()), sorted(lq_folder.iterdir())

    def __len__(self) -> int:
        return len(self.gt)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        gt, lq = (self.read(files[index]) for files in (self.gt, self.lq))
        gt, lq = (np.ascontiguousarray(img) for img in turned_crops(gt, lq))
        return {'gt': self.to_tensor(gt), 'lq': self.to_tensor(lq)}

    @staticmethod
    def read(file: Path) -> np.ndarray:
        img = cv2.imdecode(np.frombuffer(file.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
        return img.astype(np.float32) / 255

    @staticmethod
    def to_tensor(img: np.ndarray) -> Tensor:
        return torch.from_numpy(cv2.cvtColor(img, cv2.COLOR_BGR2RGB).transpose(2, 0, 1)).float()


class RawPairs(Dataset):
    """The limit: pixels that lie decoded in memory, from which just the crops are taken."""

    def __init__(self, gt_folder: Path, lq_folder: Path):
        self.gt, self.lq = map(self.raw_pixels, (gt_folder, lq_folder))

    def __len__(self) -> int:
        return len(self.gt)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        gt, lq = turned_crops(self.gt[index], self.lq[index])
        return {'gt': self.to_tensor(gt), 'lq': self.to_tensor(lq)}

    @staticmethod
    def raw_pixels(folder: Path) -> np.ndarray:
        """All images of a folder, (n, h, w, 3), in a mapped file beside it."""
        images = np.stack([cv2.imread(str(file)) for file in sorted(folder.iterdir())])
        file = folder.with_suffix('.raw')
        images.tofile(file)
        # A plain array: a memmap takes longer to slice.
        return np.asarray(np.memmap(file, np.uint8, 'r', shape=images.shape))

    @staticmethod
    def to_tensor(img: np.ndarray) -> Tensor:
        planes = np.ascontiguousarray(img[..., ::-1].transpose(2, 0, 1))
        return torch.from_numpy(planes).float().div_(255)


def turned_crops(gt: np.ndarray, lq: np.ndarray) -> list[np.ndarray]:
    """Views of one random place of both images, in one of eight orientations."""
    size = GT_SIZE // SCALE
    top = random.randint(0, lq.shape[0] - size)
    left = random.randint(0, lq.shape[1] - size)
    hflip, vflip, rot90 = (random.random() < 0.5 for _ in range(3))
    crops = []
    for img, factor in ((gt, SCALE), (lq, 1)):
        y, x, side = top * factor, left * factor, size * factor
        crop = img[y : y + side, x : x + side]
        crop = crop[:, ::-1] if hflip else crop
        crop = crop[::-1] if vflip else crop
        crops.append(crop.swapaxes(0, 1) if rot90 else crop)
    return crops


def train(batches: Iterable[dict[str, Tensor]], skip: int, device: str = 'cpu') -> float:
    """Make a step with every batch; returns seconds per step, not counting the first ``skip``."""
    net, l1 = build_network(NETWORK).to(device), torch.nn.L1Loss()
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    start, steps = 0.0, 0
    for steps, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        l1(net(batch['lq']), batch['gt']).backward()
        optimizer.step()
        if steps == skip:
            _wait_for(device)
            start = time.perf_counter()
    _wait_for(device)
    return (time.perf_counter() - start) / (steps - skip)


def _wait_for(device: str) -> None:
    if device == 'cuda':
        torch.cuda.synchronize()
