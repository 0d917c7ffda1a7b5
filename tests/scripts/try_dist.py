"""Install each wheel and sdist of a folder into an empty environment and run ``pardist strategies`` there.

Usage: ``python tests/scripts/try_dist.py dist``. Standard library only. Pip installs the tested dependency versions.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def try_one(archive: Path) -> None:
    """Install and run one archive.

    Raises:
        subprocess.CalledProcessError: If installing or running fails.
        RuntimeError: If the program does not list the strategies.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / "bin"
        install = [programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
        subprocess.run([*install, archive], check=True)
        # Run from another folder, to import the installed package and not the checkout.
        listed = subprocess.run([programs / "pardist", "strategies"], cwd=folder, check=True, capture_output=True)
        if b"pardist_ddp" not in listed.stdout:
            raise RuntimeError(f"{archive.name}: pardist strategies printed {listed.stdout.decode()!r}")
        print(f"{archive.name}: installs, and lists {listed.stdout.count(b'pardist_')} strategies")


def main() -> None:
    """Try every archive of the folder."""
    archives = sorted(Path(sys.argv[1]).resolve().iterdir())
    if not archives:
        raise RuntimeError(f"{sys.argv[1]} is empty. Run `make dist`.")
    for archive in archives:
        try_one(archive)


if __name__ == "__main__":
    main()
