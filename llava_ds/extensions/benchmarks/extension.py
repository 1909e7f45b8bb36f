"""Evaluate benchmarks during training."""

from llava_ds.extensions.base import Extension
from llava_ds.extensions.benchmarks.eval_tasks import open_tasks

extension = Extension(complete=open_tasks)
