"""A person's own recipe, `module:Class`: imported from beside the job file, or from the code that a run took along."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from inspect import isclass
from pathlib import Path
from types import ModuleType

from packtrain.errors import Mistake, nearest
from packtrain.recipes.recipe import Recipe
from packtrain.run.code import unpack
from packtrain.run.run import Run
from packtrain.system import cache_directory

_TOLD = ("defaults", "unit", "contents", "kind", "measure_of_best")

_searched: Path | None = None


def own_recipe(name: str, code: Path | None) -> type[Recipe]:
    """The class that `module:Class` names, with `code` searched first. Raises Mistake for what is none."""
    module, _, attribute = name.partition(":")
    if code is not None:
        _search_first(code)
    found = getattr(imported := _imported(module, code), attribute, None)
    if found is None:
        classes = [key for key, value in vars(imported).items() if isclass(value) and issubclass(value, Recipe)]
        raise Mistake(f"{module} has no {attribute}; {nearest(attribute, set(classes) - {'Recipe'})}")
    if not isclass(found) or not issubclass(found, Recipe):
        raise Mistake(f"{name} is not a recipe: make it a class that derives from packtrain.recipes.Recipe")
    if missing := list(_missing(found)):
        raise Mistake(f"{name} lacks {', '.join(missing)}; docs/recipes.md says what a recipe has")
    return found


def _missing(recipe: type[Recipe]) -> Iterator[str]:
    yield from (name for name in _TOLD if not hasattr(recipe, name))
    yield from sorted(getattr(recipe, "__abstractmethods__", ()))


def _search_first(code: Path) -> None:
    """Code of another job that was searched before gives way: its modules may have the same names."""
    global _searched  # noqa: PLW0603 - as sys.path and sys.modules are
    code = code.resolve()
    if code == _searched:
        return
    if _searched is not None:
        for name in [name for name, module in sys.modules.items() if _lies_in(module, _searched)]:
            del sys.modules[name]
        if str(_searched) in sys.path:
            sys.path.remove(str(_searched))
    sys.path.insert(0, str(code))
    invalidate_caches()
    _searched = code


def _lies_in(module: ModuleType, directory: Path) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and directory in Path(file).parents


def _imported(module: str, code: Path | None) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            where = f" in {code}" if code else ""
            raise Mistake(f"there is no module {module!r}{where}; it lies in the directory that `code` names") from None
        raise Mistake(f"{module} needs {error.name}, which is not installed here") from None
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        if isinstance(error, SyntaxError):
            where = f"{Path(error.filename or module).name}:{error.lineno}"
        raise Mistake(f"{module} cannot be imported: {type(error).__name__}: {error} ({where})") from None


def unpacked_code(run: Run) -> Path:
    """The code that a run took along, on this machine."""
    data = run.store.get(run.key("code.tar.zst"))
    place = cache_directory() / "code" / hashlib.sha256(data).hexdigest()
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="unpacking-", dir=place.parent))
        unpack(data, fresh)
        try:
            os.rename(fresh, place)  # noqa: PTH104 - whole or not at all
        except OSError:  # another process was first
            shutil.rmtree(fresh)
    return place
