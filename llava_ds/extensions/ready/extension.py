"""Register how to open folders of ready models, by the model_type in config.json."""

from functools import partial

from transformers import PreTrainedConfig

from llava_ds.constants import ConfigError
from llava_ds.extensions.base import Extension
from llava_ds.extensions.ready.architecture import ReadyArchitecture
from llava_ds.extensions.ready.known_families import NEEDED, NOT_YET, READY, family_of
from llava_ds.extensions.ready.tensor_names import but_output, read_ready
from llava_ds.extensions.table import EXTENSIONS
from llava_ds.model.open.folder import FLAG, ModelFolder, language_model_source
from llava_ds.model.open.weights import Source


class Folders:
    """Opens folders of supported families, as transformers' AutoModelForImageTextToText would."""

    model_types = tuple(READY)

    def read(self, path: str, config: dict, where: str) -> ModelFolder:
        """Read a folder. Its processor defines how images and conversations are prepared."""
        kind = config["model_type"]
        if kind in NOT_YET:
            raise ConfigError(
                f"{where} is a {kind}, but these can't be trained here yet ({NOT_YET[kind]}): give one of "
                f"{', '.join(READY)}, or a language model with --vision_tower"
            )
        if kind in NEEDED and NEEDED[kind] not in EXTENSIONS:
            raise ConfigError(f"{where} is a {kind} and needs llava_ds/extensions/{NEEDED[kind]}, which was not found")
        family = family_of(kind)
        ready, text, names = read_ready(family, path, config, self.missing(config), where)
        renames = names.renames()
        rename = renames["language_model"]
        rename = partial(but_output, rename) if names.is_tied else rename
        return ModelFolder(
            path,
            f"a ready model of {family.name} ({kind})",
            text,
            language_model_source(path, text, rename),
            tokenizer=path,
            flags={"version": "processor"},
            projector=Source(FLAG, path, renames["projector"]),
            vision_tower=Source(FLAG, path, renames["vision_tower"]),
            vision_config=ready.config.vision_config,
            architecture=ReadyArchitecture(family, ready.config),
        )

    def missing(self, config: dict) -> list[str]:
        """Return parts missing from config.json, because transformers would silently use default ones."""
        text = () if family_of(config["model_type"]).is_flat and "hidden_size" in config else ("text_config",)
        return [name for name in (*text, "vision_config") if not isinstance(config.get(name), dict)]

    def architecture(self, config: PreTrainedConfig) -> ReadyArchitecture:
        """Return the architecture: the folder's family and its configuration."""
        return ReadyArchitecture(family_of(config.model_type), config)


extension = Extension(folder=Folders())
