"""The model's config.json as the start-up checks read it: before transformers, and for architectures that only another
engine knows."""

from __future__ import annotations

import json
import os
from typing import Any


def model_file(path: Any) -> dict[str, Any]:
    """Keys of the config.json in the folder that `path` (`actor_rollout_ref.model.path`) names.

    Empty where there is none to read: a model that is made later, or is elsewhere. A file that is there and holds no
    keys is for the check of the model to refuse.
    """
    try:
        with open(os.path.join(os.path.expanduser(str(path)), "config.json"), encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
