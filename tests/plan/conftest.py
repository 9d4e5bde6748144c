from __future__ import annotations

from recipes.conftest import make_recipe

__all__ = ["make_recipe"]
