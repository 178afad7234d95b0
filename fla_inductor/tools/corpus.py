"""Real text for small experiments, from files that are already on the machine."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SUFFIXES = (".py", ".txt")
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def text_files() -> Iterator[Path]:
    """The Python and text files of this package and of the standard library, without its tests, in a fixed order."""
    yield from _walk(Path(__file__).parent.parent)
    yield from _walk(Path(sysconfig.get_path("stdlib")))


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in SKIPPED:
            yield from _walk(path)
        elif path.suffix in SUFFIXES:
            yield path


def load(path: Path | None = None, limit: int = 4_000_000) -> Tensor:
    """The bytes of `path`, or of `text_files()`, as a uint8 tensor of at most `limit` elements."""
    if path is not None:
        data = path.read_bytes()[:limit]
    else:
        data = b""
        for file in text_files():
            if len(data) >= limit:
                break
            data += file.read_bytes()
        data = data[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Batches:
    """Random windows of `length` bytes from nine tenths of a text, or from the tenth that is held out."""

    def __init__(self, data: Tensor, batch: int, length: int, device: torch.device, held_out: bool = False) -> None:
        # the held-out tenth is spread over the text: its end may be of another kind than its start
        blocks = data.split(max(1, -(-data.numel() // 100)))
        self.data = torch.cat([x for i, x in enumerate(blocks) if (i % 10 == 9) == held_out] or [data[:0]])
        if self.data.numel() <= length:
            raise ValueError(f"text of {data.numel()} bytes: expected over {10 * length + 1000}")
        self.batch = batch
        self.length = length
        self.device = device
        self.generator = torch.Generator().manual_seed(0)

    def draw(self) -> Tensor:
        """The next batch [batch, length] of bytes, as int64."""
        starts = torch.randint(self.data.numel() - self.length, (self.batch, 1), generator=self.generator)
        windows = self.data[starts + torch.arange(self.length)]
        return windows.to(self.device, torch.int64)
