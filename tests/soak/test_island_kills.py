"""Random kills of islands: the others continue, killed ones rejoin, and the loss equals that of a run without kills.

``make soak`` runs this; PARDIST_SOAK_KILLS bounds it (50 kills).
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.nn import functional as F

from lightning_pardist.engines.averaging import OuterServer
from tests.helpers.scripts import ENVIRONMENT, ROOT
from tests.scripts.island import Module, dataset

pytestmark = pytest.mark.soak

SCRIPT = str(ROOT / "tests" / "scripts" / "island.py")
ISLANDS = 3
KILLS = int(os.environ.get("PARDIST_SOAK_KILLS", "50"))
SEED = int(os.environ.get("PARDIST_SOAK_SEED", "7"))
#: Steps of a run without kills; a killed island repeats those since its last checkpoint.
STEPS = 2500
#: Pause between two kills: an island needs about six seconds to rejoin.
PAUSES_S = (2.0, 10.0)
LIMIT_S = 1800.0


class Jobs:
    """Islands of a run, restarted when they are killed."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps
        self.server = OuterServer("127.0.0.1", 0, timeout_s=10.0)
        threading.Thread(target=self.server.serve, daemon=True).start()
        self.processes = [self._start(island) for island in range(ISLANDS)]

    def _start(self, island):
        home = self.folder / str(island)
        home.mkdir(parents=True, exist_ok=True)
        with (home / "output.txt").open("a") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, SCRIPT, f"127.0.0.1:{self.server.address[1]}"),
                    *(str(island), str(ISLANDS), str(home), str(self.steps)),
                ],
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=home,
            )

    def kill(self, island):
        """Kill an island and restart it; return whether it was still training."""
        process = self.processes[island]
        if process.poll() is not None:
            return False
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.processes[island] = self._start(island)
        return True

    def wait(self, limit_s):
        deadline = time.monotonic() + limit_s
        for process in self.processes:
            assert process.wait(timeout=max(1.0, deadline - time.monotonic())) == 0

    def loss(self, island):
        module = Module()
        module.load_state_dict(torch.load(self.folder / str(island) / "weights.pt"))
        x, y = dataset().tensors
        return F.cross_entropy(module.net(x), y).item()

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.server.close()


@pytest.mark.timeout(4 * LIMIT_S)
def test_random_kills_of_islands(tmp_path):
    draw = random.Random(SEED)
    quiet = Jobs(tmp_path / "quiet", STEPS)
    try:
        quiet.wait(LIMIT_S)
        wanted = max(quiet.loss(island) for island in range(ISLANDS))
    finally:
        quiet.close()
    jobs, kills, begun = Jobs(tmp_path / "killed", STEPS), 0, time.monotonic()
    try:
        while kills < KILLS and time.monotonic() - begun < LIMIT_S:
            time.sleep(draw.uniform(*PAUSES_S))
            alive = [island for island, process in enumerate(jobs.processes) if process.poll() is None]
            if not alive:
                break
            kills += jobs.kill(draw.choice(alive))
        jobs.wait(LIMIT_S)
        found = [jobs.loss(island) for island in range(ISLANDS)]
    finally:
        jobs.close()
    print(f"{kills} kills in {time.monotonic() - begun:.0f} s; loss {max(found):.5f}, without kills {wanted:.5f}")
    assert max(found) <= 1.02 * wanted
