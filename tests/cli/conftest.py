import sys

import pytest

from verl_tim.launch import process


@pytest.fixture
def small(tmp_path, model_folder):
    """Overrides under which nothing is made and nothing is looked for outside the test's folder."""
    return [
        f"actor_rollout_ref.model.path={model_folder}",
        f"tim.cache_dir={tmp_path}/cache",
        f"tim.run_dir={tmp_path}/run",
        "tim.task.train_size=32",
        "tim.task.val_size=4",
        "trainer.total_training_steps=2",
    ]


@pytest.fixture
def fake_verl(monkeypatch, tmp_path):
    """verl replaced by a script that logs what it is told to, and ends as it is told to."""

    def use(rewards=(0.2, 0.4), exit_code=0, last_words=""):
        script = tmp_path / "fake_verl.py"
        steps = [
            {"step": 0, "data": {"val-core/chain_sum/reward/mean@1": 0.25}},
            *(
                {"step": number, "data": {"critic/score/mean": reward, "tim/delta_abs_max": 0.0, "timing_s/step": 1.5}}
                for number, reward in enumerate(rewards, start=1)
            ),
        ]
        script.write_text(
            "import json, sys\n"
            f"steps = {steps!r}\n"
            "open(sys.argv[1] + '/metrics.jsonl', 'w').write(''.join(json.dumps(step) + '\\n' for step in steps))\n"
            f"print({last_words!r})\n"
            f"sys.exit({exit_code})\n"
        )
        monkeypatch.setattr(process, "verl_command", lambda run_dir: [sys.executable, str(script), str(run_dir)])

    return use
