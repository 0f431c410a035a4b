"""Several processes test on one GPU: each has a share of its memory and gives back what it cached.

Of the GEMM tests' layers three take more than 2.2 GiB: 57344x8192 (4.4), 36864x7168 (2.9) and
8192x28672 (2.5). One process has them, with the quantizers' 6.1 GiB, in the group "large". Without
this, blocks that each allocator kept for shapes long past filled a GPU of 140 GB.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

GIB = 1 << 30
NEEDED = 7 * GIB  # what the largest test holds, and some room for blocks that do not fit together
OUTSIDE = GIB  # context, modules and workspaces of a process, which no allocator counts
KEPT = GIB // 4  # cached blocks worth giving back


@pytest.fixture(scope="session", autouse=True)
def share_of_memory():
    """At its limit PyTorch frees what it has cached before it asks for more."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1 and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        share = max(0.9 * total / processes - OUTSIDE, NEEDED)
        torch.cuda.set_per_process_memory_fraction(min(share / total, 1.0))


@pytest.fixture(autouse=True)
def cached_blocks_are_given_back():
    yield
    if not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_allocated() > GIB:
        gc.collect()
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEPT:
        torch.cuda.empty_cache()
