"""The package and its dependencies; settings of ruff and pytest are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "llava_ds" / "__init__.py").read_text(encoding="utf-8"))[1]

setup(
    name="llava_ds",
    version=version,
    description="A LLaVA-style image-text model trainer written directly on the DeepSpeed engine",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.10",
    # Where it is installed, run/ and ds_configs/ lie within the package (llava_ds/config/recipes.py).
    packages=[*find_packages(include=["llava_ds", "llava_ds.*"]), "llava_ds.run", "llava_ds.ds_configs"],
    package_dir={"llava_ds.run": "run", "llava_ds.ds_configs": "ds_configs"},
    package_data={
        "llava_ds.tiny": ["weights/*/*"],
        "llava_ds.tracking": ["templates/*.j2"],
        "llava_ds.model.families": ["llava_classes.json"],
        "llava_ds.run": ["recipes/*.yaml", "slurm.sh", "hostfile.example"],
        "llava_ds.ds_configs": ["*.json", "README.md"],
    },
    entry_points={"console_scripts": ["llava-ds = llava_ds.runtime.cli:main"]},
    install_requires=[
        "torch>=2.10",
        "deepspeed>=0.19.8,<0.20",  # a few of its private names are used, each with the reason beside it
        "transformers>=5.17,<6",
        "tokenizers",
        "sentencepiece",  # Vicuna and others come with tokenizer.model only
        "protobuf",
        "datasets>=4",
        "fsspec",  # comes with datasets
        "safetensors",
        "pillow>=11.2",
        "numpy",
        "pydantic>=2",  # these two come with deepspeed
        "psutil",
        "jinja2",
        "pyyaml",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "flash": ["flash-attn>=2.7"],
        "liger": ["liger-kernel>=0.8"],
        "lora": ["peft>=0.17"],
        "qlora": ["peft>=0.17", "bitsandbytes>=0.50"],  # from then on with CPU kernels for all of it
        "video": ["av>=14"],
        "s3": ["s3fs"],  # data in object stores, and of other stores the package that a message names
        "gs": ["gcsfs"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "trackio": ["trackio"],
        "demo": ["gradio>=6.31,<7"],
        "serve": ["fastapi>=0.115", "uvicorn>=0.30"],
        "gguf": ["gguf>=0.19"],
        "bench": ["accelerate>=1.1"],  # what transformers' Trainer, the other side, asks for
        "dev": [
            *("pytest", "pytest-xdist", "ruff", "tensorboard", "av", "peft", "bitsandbytes", "accelerate", "gguf"),
            *("fastapi", "uvicorn", "openai"),  # the endpoint, and the client that it is tested with
        ],
    },
)
