"""Options and fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# code compiled by an earlier version of a lowering must not be found, and workers must not share files that they write
_CACHE = tempfile.mkdtemp(prefix="fla_inductor_tests_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
if "PYTEST_XDIST_WORKER" in os.environ:
    # one core for each worker, and for what it starts
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

pytest_plugins = ["isolation"]


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU its tests are deselected, so that `pytest -m gpu` fails there and a skip always means something."""
    if torch.cuda.is_available():
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """Where a test that runs anywhere runs: the GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def fresh_compile() -> Iterator[None]:
    """No graph, counter or guard of an earlier test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What `torch.empty` returns is full of NaN, so an output that is not written everywhere is seen."""
    memory: Any = torch.utils.deterministic
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode(mode)
    memory.fill_uninitialized_memory = filled
