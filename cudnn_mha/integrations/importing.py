"""Adapters that are registered when their library is imported, and cost nothing before."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Runs an action once a module has been imported, at once if it has.

    An action that raises gives a warning: it never breaks the import. Where the module is being
    imported right now, the action runs when the next import follows the end of that.

    Args:
        name: the module's full name.
        action: what to run.
    """
    if _is_imported(name):
        _run(action, name)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


def _is_imported(name: str) -> bool:
    """Whether a module is there, and whole."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _run(action: Callable[[], None], name: str) -> None:
    try:
        action()
    except Exception as error:
        message = f"cudnn_mha is not registered with {name} ({type(error).__name__}: {error})"
        try:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # warnings are errors here, and an error would break the import
            print(message, file=sys.stderr)


class _Finder(MetaPathFinder):
    """Finds one module as all others would, with a loader that runs the action at its end."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name = name
        self._action = action
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            if not _is_imported(self._name):
                return None
            self._done()
            # The action may have imported what is looked for, which must not be there twice.
            there = sys.modules.get(name)
            if there is None or there.__spec__ is None:
                return None
            there.__spec__.loader = _There(there, there.__spec__.loader)
            return there.__spec__
        if getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = find_spec(name)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._done)
        return spec

    def _done(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _run(self._action, self._name)


class _Loader(Loader):
    """A module's own loader, and what follows when it is done."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done()


class _There(Loader):
    """Loads a module that is there already, once."""

    def __init__(self, module: ModuleType, loader: Any) -> None:
        self._module = module
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
