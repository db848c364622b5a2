"""An engine's start probes what it will use: its model, its pages."""

from __future__ import annotations

import pytest

from tests.engine.tiny_models import save
from verl_tim.engine import EngineConfig
from verl_tim.engine.engine import _build_model
from verl_tim.models import engine_model


@pytest.mark.parametrize(("page_size", "want"), [(None, 16), (4, 4)])
def test_pages_are_those_of_the_engine(page_size, want, tmp_path, monkeypatch):
    probed = []
    monkeypatch.setattr(engine_model, "probe", lambda device, dtype, shapes, attention: probed.append(shapes))
    _build_model(EngineConfig(str(save("qwen3", tmp_path)), page_size=page_size, kv_cache_tokens=64), None)
    assert [shapes.page_size for shapes in probed] == [want]
