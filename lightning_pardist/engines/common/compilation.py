"""``torch.compile`` for repeated blocks or the whole training step, with a record of compilations and compile time.

Blocks are compiled per class (regional compilation): all blocks of a class share one compiled function, which is
compiled for the first of them. A block's class is replaced by a subclass of the same name whose ``forward`` is
compiled. State dict names are unchanged, hooks on blocks run outside of compiled code (including the all-gathers of
``fully_shard``), and a copy of a block is compiled too, with its own parameters.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lightning_pardist.compat.autograd import not_compiled
from lightning_pardist.compat.compilation import backend_of, compiles_itself
from lightning_pardist.engines.common.activation_checkpointing import repeated_blocks

#: ``"blocks"``: repeated blocks; ``"step"``: all of ``training_step``; ``"auto"``: nothing.
Compile = Literal["auto", "blocks", "step"]
#: The name of a registered backend, or a function of a graph and its inputs.
Backend = str | Callable[..., Any]


class Compilation:
    """The compiled parts of a module during a run.

    Args:
        setting: What to compile.
        backend: The compiler backend.
        report: Called with a message for every recompilation.
    """

    def __init__(self, setting: Compile, backend: Backend, *, report: Callable[[str], None]) -> None:
        self.setting, self.backend = setting, backend
        self.report = report
        #: Number of compiled graphs, seconds spent in the backend, and number of calls that recompiled.
        self.graphs, self.seconds, self.again = 0, 0.0, 0
        self._run: Callable[..., Any] | None = None
        self._seen: set[Hashable] = set()
        self._classes: dict[type, type] = {}
        self._names: dict[int, str] = {}
        self._blocks: list[nn.Module] = []

    def compile_blocks(self, module: nn.Module) -> None:
        """Set up compilation of a module's repeated blocks, in place; they compile when first called. Not collective.

        Blocks that the user has compiled, or that are part of a compiled module, are left unchanged.

        Raises:
            ValueError: If there are no repeated blocks, the ``forward`` of one was replaced on the instance, or the
                backend does not exist.
        """
        self._begin()
        taken = {child for each in module.modules() if compiles_itself(each) for child in each.modules()}
        # Some may be compiled already, if an earlier run left the module sharded.
        self._blocks = [b for b in repeated_blocks(module) if b not in taken and not isinstance(b, _Compiled)]
        names = {child: name for name, child in module.named_modules()}
        if not self._blocks and not any(isinstance(each, _Compiled) for each in module.modules()):
            raise ValueError(
                f"compile='blocks' found no repeated blocks in {type(module).__name__} that are not compiled already."
                " Use compile='step', or leave it out."
            )
        if patched := [names[block] for block in self._blocks if "forward" in block.__dict__]:
            raise ValueError(
                f"compile='blocks' would compile {', '.join(patched)}, whose forward was replaced on the instance."
                " Override forward in a class, or leave compile out."
            )
        self._names = {id(block): names[block] for block in self._blocks}
        for block in self._blocks:
            block.__class__ = self._subclass(type(block))

    def compiled_step(self, module: nn.Module, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled step function. Calls of ``log`` and ``log_dict`` are graph breaks.

        Raises:
            ValueError: If the backend does not exist.
        """
        self._begin()
        compiled = torch.compile(step, backend=self._compile)
        name = getattr(step, "__name__", "training_step")

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._noting(name, (name, torch.is_grad_enabled())), _logging_breaks(module):
                return compiled(*args, **kwargs)

        return run

    def undo(self) -> None:
        """Restore the classes of blocks, except for blocks whose class has been changed again since."""
        for block in self._blocks:
            if type(block).__mro__[1] is _Compiled:
                block.__class__ = type(block).__mro__[2]
        self._blocks.clear()
        self._names.clear()

    def __str__(self) -> str:
        what = "training_step" if self.setting == "step" else f"{len(self._blocks)} blocks"
        name = self.backend if isinstance(self.backend, str) else getattr(self.backend, "__name__", "a function")
        text = f"compile={self.setting!r}: {what} by {name}"
        if self.graphs:
            text += f", {self.graphs} graphs in {self.seconds:.1f} s"
        return text + (f", recompiled in {self.again} calls" if self.again else "")

    # --- compilation and recompilation --------------------------------------------------------------------------

    def _begin(self) -> None:
        self._run = backend_of(self.backend)
        # Keep one object: each access creates a new bound method, and each backend object causes a compilation.
        self._compile = self._compile_graph

    def _compile_graph(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            if self._run is None:
                raise RuntimeError("no compiler backend is set")
            return self._run(graph, inputs, **kwargs)
        finally:
            self.graphs += 1
            self.seconds += time.perf_counter() - begin

    @contextmanager
    def _noting(self, name: str, key: Hashable) -> Iterator[None]:
        before = self.graphs
        yield
        if self.graphs == before:
            return
        if key not in self._seen:
            self._seen.add(key)
            return
        self.again += 1
        self.report(
            f"{name} was recompiled ({self.again} recompilations so far), because shapes, an attribute or a flag"
            " differ from the call for which it was compiled. Set TORCH_LOGS=recompiles to see the reason."
        )

    def _subclass(self, cls: type) -> type:
        """Return the subclass with a compiled ``forward``, one per class, so that blocks still share a class."""
        if cls not in self._classes:
            compiled = torch.compile(cls.forward, backend=self._compile)  # type: ignore[attr-defined]

            @functools.wraps(cls.forward)  # type: ignore[attr-defined]
            def forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
                key = (cls, torch.is_grad_enabled(), block.training)
                with self._noting(self._names.get(id(block), cls.__name__), key):
                    return compiled(block, *args, **kwargs)

            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
            self._classes[cls] = type(cls.__name__, (_Compiled, cls), {**names, "forward": forward})
        return self._classes[cls]


class _Compiled:
    """Mixin that marks the class of a compiled block."""


@contextmanager
def _logging_breaks(module: nn.Module) -> Iterator[None]:
    """Exclude ``log`` and ``log_dict`` from compilation inside."""
    before = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
    module.__dict__.update({name: _opaque(getattr(module, name)) for name in before if hasattr(module, name)})
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = own


#: Cached, because bound methods are equal but not identical, and the compiler guards on identity.
@functools.lru_cache(maxsize=64)
def _opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    return not_compiled(function)
