"""Register --check_plugin, the check of plugins before training."""

from llava_ds.extensions.base import Extension
from llava_ds.extensions.plugins.proof import prove

extension = Extension(choices={"check_plugin": prove})
