"""Kill ranks at random that save in an endless loop: ``python kill_saves.py FOLDER KILLS SECONDS SEED``.

After every kill, the last reported checkpoint, or a later one, must exist and be intact. Ranks are forked, which
makes a round take a fraction of a second; the last line of output counts the rounds.
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from datetime import timedelta

import lightning_pardist  # noqa: F401  # isort: skip
import torch
import torch.distributed as dist

from lightning_pardist.checkpoint.chunks import Chunk, Shards
from lightning_pardist.checkpoint.coordination import GroupCoordinator, together
from lightning_pardist.checkpoint.folder import FolderReader, FolderSave
from lightning_pardist.checkpoint.full_file import load_file, save_file, verify_file
from lightning_pardist.checkpoint.manifest import verify_files

WORLD, ROWS = 2, 200_000


def _rank(rank: int, path: str, meeting: str, first: int, sharded: bool, report: int) -> None:
    store = dist.FileStore(meeting, WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    exchange = GroupCoordinator()
    number = first
    while True:
        number += 1
        values = torch.full((ROWS // WORLD, 2), float(number))
        if sharded:
            part = Chunk((rank * ROWS // WORLD, 0), values)
            save = FolderSave({"model.weight": Shards((ROWS, 2), torch.float32, (part,))}, path)
            save.plan(exchange)
            save.write(exchange, {"number": number})
        else:
            state = {"number": number, "weight": torch.full((ROWS, 2), float(number))}
            together(exchange, "saving", lambda state=state: save_file(state, path) if rank == 0 else None)
        if rank == 0:
            os.write(report, f"{number}\n".encode())


def _fork(rank: int, *arguments: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    # Errors are expected when the other rank is killed.
    with contextlib.suppress(BaseException):
        _rank(rank, *arguments)  # type: ignore[arg-type]
    os._exit(0)


def _found(path: str) -> int:
    """Return the number of the existing checkpoint after verifying all of its bytes."""
    if os.path.isdir(path):
        reader = FolderReader(path)
        verify_files(path, reader.manifest)
        number, weight = reader.trainer_state()["number"], reader.read("model.weight")
    else:
        verify_file(path)
        state = load_file(path)
        number, weight = state["number"], state["weight"]
    if not torch.equal(weight, torch.full((ROWS, 2), float(number))):
        raise SystemExit(f"checkpoint {number} holds values of another one")
    return int(number)


def main() -> None:
    folder, kills, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    chance = random.Random(seed)
    path = os.path.join(folder, "last.ckpt")
    deadline = time.monotonic() + seconds
    known, done = 0, {"one": 0, "all": 0}
    while sum(done.values()) < kills and time.monotonic() < deadline:
        reader, report = os.pipe()
        meeting = os.path.join(folder, f".meeting-{sum(done.values())}")
        sharded = chance.random() < 0.7
        pids = [_fork(rank, path, meeting, known, sharded, report) for rank in range(WORLD)]
        os.close(report)
        said = ""
        if select.select([reader], [], [], 30)[0]:
            said = os.read(reader, 4096).decode()
        time.sleep(chance.random() * 0.06)
        kind = chance.choice(["one", "all"])
        for pid in [chance.choice(pids)] if kind == "one" else pids:
            os.kill(pid, signal.SIGKILL)
        ended = time.monotonic() + 25
        left = set(pids)
        while left and time.monotonic() < ended:
            left = {pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.005)
        if left:
            raise SystemExit(f"a rank still waits 25 s after the other was killed: {left}")
        while block := os.read(reader, 4096):
            said += block.decode()
        os.close(reader)
        reported = max((int(line) for line in said.split()), default=known)
        if os.path.exists(meeting):
            os.remove(meeting)
        now = _found(path) if reported else 0
        if now < reported:
            raise SystemExit(f"checkpoint {reported} was reported and {now} found")
        known, done[kind] = now, done[kind] + 1
    left_over = sorted(name for name in os.listdir(folder) if name != "last.ckpt")
    print(json.dumps({**done, "saved": known, "left": left_over}))


if __name__ == "__main__":
    main()
