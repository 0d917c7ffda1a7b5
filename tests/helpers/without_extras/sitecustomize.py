"""Hide the packages named in ``PARDIST_TEST_WITHOUT``: torchmetrics would import them, which takes seconds."""

import importlib.abc
import importlib.metadata
import os
import sys

HIDDEN = frozenset(filter(None, os.environ.get("PARDIST_TEST_WITHOUT", "").split(",")))


class _Hider(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return


def _version(name, _found=importlib.metadata.version):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return _found(name)


if HIDDEN:
    sys.meta_path.insert(0, _Hider())
    importlib.metadata.version = _version
