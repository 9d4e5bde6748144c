from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from packtrain.errors import Mistake
from packtrain.export.ctranslate2 import Ctranslate2Form, Ctranslate2Text
from packtrain.export.predict import load_model
from packtrain.pack.vocabulary import BOS, EOS, PAD
from packtrain.recipes.decode import TorchText
from packtrain.recipes.recipe import Decoding
from packtrain.recipes.transformer import Transformer
from pack.corpus import job_of
from parts.models import commit_model, packed_run


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    run = packed_run(tmp_path, job_of(tmp_path))
    commit_model(run, tmp_path, 10, seed=1, score=3.0)
    return load_model(run)
