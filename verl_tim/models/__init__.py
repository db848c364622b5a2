"""Models: the engine's lean forward, and beside it the trainer's table that serves the Hugging Face model by the same
ops."""

from verl_tim.models.config import ModelConfig, ModelError, MoEConfig, RopeSpec, config_from_hf, load_model_config
from verl_tim.models.engine_model import EngineModel, build_model
from verl_tim.models.trainer import ContractForward, ContractOutput, apply_contract
from verl_tim.models.weights import WeightError, weight_checksum

__all__ = [
    "ContractForward",
    "ContractOutput",
    "EngineModel",
    "MoEConfig",
    "ModelConfig",
    "ModelError",
    "RopeSpec",
    "WeightError",
    "apply_contract",
    "build_model",
    "config_from_hf",
    "load_model_config",
    "weight_checksum",
]
