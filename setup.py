"""Packaging of verl_tim: a verl plugin. Tool settings live in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# configs/ and recipes/ stay at the top level, where a reader looks for them, and install as subpackages, so that
# Hydra's pkg:// search path finds them from any folder, editable or from a wheel.
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/__init__.py"))
CONFIG_GROUPS = sorted(path.parent.name for path in (ROOT / "configs").glob("*/__init__.py"))

TYPE_AND_LINT = ["ruff>=0.9", "mypy>=1.13"]
TEST = [
    "pytest>=8",
    "pytest-asyncio>=0.24",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "setuptools>=77",
    # a CPU build of torch brings none; the kernels' logic is tested in its interpreter
    # (3.6: the version that the GPU stack has, and whose interpreter tests/numerics/gpu/interpreter.py repairs)
    "triton>=3.6,<3.7; platform_system == 'Linux' and platform_machine == 'x86_64'",
]
DEV = [*TEST, *TYPE_AND_LINT]
# what `tracker=` can name beside the console and files; verl itself brings wandb and tensorboard
TRACKERS = {
    "wandb": ["wandb>=0.18"],
    "tensorboard": ["tensorboard>=2.16"],
    "swanlab": ["swanlab>=0.10"],
    "mlflow": ["mlflow>=3.0"],
    "trackio": ["trackio>=0.43"],
}

setup(
    name="verl_tim",
    version="0.1.0",
    description="Zero training-inference mismatch for verl: exact rollouts, correction, and diagnosis",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=[
        *find_packages(include=["verl_tim", "verl_tim.*"]),
        "verl_tim.configs",
        *(f"verl_tim.configs.{group}" for group in CONFIG_GROUPS),
        "verl_tim.recipes",
        *(f"verl_tim.recipes.{recipe}" for recipe in RECIPES),
    ],
    package_dir={"verl_tim.configs": "configs", "verl_tim.recipes": "recipes"},
    package_data={"": ["*.yaml", "*.md", "*.html.j2", "*.md.j2", "*.sh.j2", "*.json", "py.typed"]},
    install_requires=[
        "verl==0.9.1",
        # what verl's trainer imports, and only verl's extra verl-core lists (among packages for GPUs and vision)
        "TransferQueue>=0.1.10",
        "pyzmq",
        "msgspec",
        "fastapi",
        "uvicorn",
        "cachetools",
        "torch>=2.11,<2.15",
        "transformers>=5.5.3,!=5.6.0,<5.11",
        "tensordict>=0.8.0,!=0.9.0,<=0.10.0",
        "ray>=2.41",
        "hydra-core>=1.3,<1.4",
        "omegaconf>=2.3,<2.4",
        "huggingface-hub>=1.5",
        "numpy>=2",
        "pandas>=2",
        "pyarrow>=19",
        "safetensors>=0.4",
        "tokenizers>=0.21",
        "reasoning-gym>=0.1.25",
        # pinned: what it takes for equal is the reward; tests/tasks holds what it must and what it cannot
        "math-verify==0.9.0",
        "wrapt>=1.16",
        "psutil>=5.9",
        # fastapi's and Ray's own
        "pydantic>=2",
        "jsonschema>=4",
        "PyYAML>=6",
        "rich>=13.7",
        "typer>=0.15",
        "jinja2>=3.1",
        "markupsafe>=2.1",
        # 6.3: unified hover titles
        "plotly>=6.3",
        "prometheus-client>=0.19",
        # compare --png; plotly's own export would start a browser
        "matplotlib>=3.8",
        "tqdm>=4.66",
    ],
    extras_require={
        "gpu": ["verl[vllm]==0.9.1"],
        **TRACKERS,
        "trackers": [package for packages in TRACKERS.values() for package in packages],
        # what the tests need, without linters: enough for scripts/test_gpu.sh
        "test": TEST,
        "dev": DEV,
        "all": ["verl[vllm]==0.9.1", *(package for packages in TRACKERS.values() for package in packages), *DEV],
    },
    entry_points={
        "verl.plugins": ["verl_tim = verl_tim.plugin"],
        "console_scripts": ["verl-tim = verl_tim.cli:main"],
    },
)
