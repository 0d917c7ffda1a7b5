"""Fixtures that fail a test for leaving process groups, threads, child processes or environment variables behind."""

import os
import threading
from fnmatch import fnmatchcase

import psutil
import pytest
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

import lightning_pardist  # noqa: F401  (before anything that imports torchvision)
from tests.helpers import ranks

_KNOWN_THREADS = ("pytest", "QueueFeederThread", "Dummy-", "MainThread", "ThreadPoolExecutor", "timeout")
_KNOWN_VARIABLES = (
    "PYTEST_CURRENT_TEST",
    "OMP_NUM_THREADS",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "KMP_",
    "TF_",
    "LC_CTYPE",
    "COLUMNS",
    # Set by CUDA builds of torch.
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_ORDER",
    "PARDIST_TEST_DEVICE",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    unmatched = {}
    for item in items:
        if marker := item.get_closest_marker("push"):
            matching = {pattern for pattern in marker.args if fnmatchcase(item.callspec.id, pattern)}
            left = unmatched.setdefault(item.nodeid.partition("[")[0], set(marker.args))
            left -= matching
            if not matching:
                item.add_marker(pytest.mark.slow)
    wrong = {name: sorted(left) for name, left in unmatched.items() if left}
    if wrong and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"Patterns of the mark push that match no case: {wrong}")


def pytest_sessionfinish(session):
    ranks.close_pools()


@pytest.fixture(autouse=True, scope="module")
def _ranks_end_with_their_file():
    yield
    ranks.close_pools()


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    variables = dict(os.environ)
    threads = {thread.ident for thread in threading.enumerate()}
    children = {child.pid for child in psutil.Process().children()}
    rank = getattr(rank_zero_only, "rank", 0)
    yield
    # Warnings and logs of a later test depend on it.
    rank_zero_only.rank = rank
    problems = []
    if dist.is_initialized():
        dist.destroy_process_group()
        problems.append("a process group")
    pool = {process.pid for one in ranks._pools.values() for process in one.processes}
    # Inductor's compile workers persist, as does Open MPI's daemon, which Lightning starts if mpi4py is installed.
    servers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "_inductor/compile_worker", "orted ")
    left = {
        child.pid: " ".join(child.cmdline())
        for child in psutil.Process().children()
        if child.pid not in children | pool and child.status() != psutil.STATUS_ZOMBIE
    }
    left = {pid: command for pid, command in left.items() if not any(server in command for server in servers)}
    if left:
        problems.append(f"processes {left}")
    problems += [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread.ident not in threads and not thread.name.startswith(_KNOWN_THREADS) and "pardist" in thread.name
    ]
    changed = {name for name in {*variables, *os.environ} if variables.get(name) != os.environ.get(name)}
    changed = {name for name in changed if not name.startswith(_KNOWN_VARIABLES)}
    # A seed set by one test would otherwise apply to every later Trainer.
    for name in {*changed, "PL_GLOBAL_SEED", "PL_SEED_WORKERS"} & {*variables, *os.environ}:
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
    if changed:
        problems.append(f"environment variables {sorted(changed)}")
    assert not problems, f"left behind: {', '.join(problems)}"
