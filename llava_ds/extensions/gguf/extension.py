"""GGUF as a format of run/export.py."""

from pathlib import Path

from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Entry
from llava_ds.extensions.base import Extension, FolderForm

USAGE = """\
In llama.cpp, and in Ollama:

    llama-server --model {folder}/model.gguf --mmproj {folder}/mmproj.gguf
    ollama create {folder} --file {folder}/Modelfile
"""


class Gguf(FolderForm):
    """Two GGUF files and a Modelfile."""

    library = "gguf"

    def planned(self, export: ExportPlan, dtype: str) -> ExportPlan:
        from llava_ds.extensions.gguf.gguf_folder import with_gguf_type

        return with_gguf_type(export, dtype)

    def write(self, export: ExportPlan, entries: list[Entry], folder: Path) -> None:
        from llava_ds.extensions.gguf.gguf_folder import write_gguf

        write_gguf(export, entries, folder)

    def usage(self, folder: str) -> str:
        return USAGE.format(folder=folder)


extension = Extension(choices={"format": Gguf()})
