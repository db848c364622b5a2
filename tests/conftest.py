import pytest

from verl_tim.tasks.architectures import init_model, resolve_shape
from verl_tim.tasks.tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A small Qwen3 in Hugging Face format, untrained: enough for everything that only reads a model's folder."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(model_max_length=1024)
    model = init_model(
        "qwen3",
        resolve_shape("qwen3"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        seed=0,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
