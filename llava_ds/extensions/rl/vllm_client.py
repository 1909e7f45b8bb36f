"""Generate with vLLM in a separate process (run/vllm_server.py) that gets the weights before every step."""

import base64
import io
import json
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from llava_ds.constants import IMAGE_TOKEN_INDEX, ConfigError, DataError
from llava_ds.data.collate import LoadedSample
from llava_ds.data.images.decode import load_image
from llava_ds.data.sample import FileRef
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.final_export import write_model
from llava_ds.files.reading import read_json
from llava_ds.runtime.ranks import Ranks, broadcast_from_first
from llava_ds.train.evaluating.sampling import Answer, DrawRules

TIMEOUT_S = 3600.0  # time limit for the answers of one rank in one step


class VllmServer:
    """A client of a vLLM server. folder: holds weights for the server to read. export: the format of the weights."""

    def __init__(self, url: str, folder: Path, export: ExportPlan, ranks: Ranks) -> None:
        if export.form != "hf":
            raise ConfigError(
                "--vllm_server reads transformers' format, but transformers has no class for this model: leave it out"
            )
        self._url, self._folder, self._export, self._ranks = url.rstrip("/"), folder, export, ranks

    def push(self, engine) -> None:
        """Send the current weights to the server. Collective."""
        if self._ranks.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
        write_model(engine, self._export, self._ranks, self._folder)
        broadcast_from_first(self._ranks, lambda: self._ask("load", folder=str(self._folder.resolve())))

    def draw(
        self, prompts: list[LoadedSample], places: list[list], seeds: list[tuple[int, ...]], rules: DrawRules
    ) -> list[list[Answer]]:
        """Generate num_answers answers for every prompt. Not collective.

        places: paths of each prompt's images, from EncodedDataset.images_of. seeds: one per prompt. Raises DataError if
        the server fails, or if a prompt has a video.
        """
        image_token = read_json(self._folder / "config.json", dict)["image_token_index"]
        sampling = {"temperature": rules.temperature, "top_p": rules.top_p, "stop_token_ids": list(rules.ends)}
        found = self._ask(
            "draw",
            prompts=[
                {"ids": with_one_token_an_image(prompt, image_token), "images": [self._png(place) for place in own]}
                for prompt, own in zip(prompts, places)
            ],
            seeds=[np.random.SeedSequence(each).generate_state(rules.num_answers).tolist() for each in seeds],
            max_tokens=[rules.room(prompt) for prompt in prompts],
            sampling={**sampling, "top_k": rules.top_k or -1},
        )
        return [[_answer(one) for one in answers] for answers in found["answers"]]

    def _png(self, place: str | dict[str, object]) -> str:
        """Return an image as a base64 PNG, upright and in RGB."""
        ref, stream = FileRef(**place) if isinstance(place, dict) else place, io.BytesIO()
        load_image(ref, value_range=self._export.image_options.value_range).save(stream, "PNG")
        return base64.b64encode(stream.getvalue()).decode()

    def _ask(self, what: str, **request: object) -> dict:
        body = json.dumps(request).encode()
        asked = urllib.request.Request(f"{self._url}/{what}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:2000]
            raise DataError(f"--vllm_server {self._url} failed at /{what}: {said}") from error
        except (OSError, ValueError) as error:
            raise DataError(
                f"--vllm_server {self._url} does not answer ({error}): start python run/vllm_server.py in vLLM's "
                "environment, on this machine, with the folder of --model_name_or_path"
            ) from error


def with_one_token_an_image(sample: LoadedSample, image_token: int) -> list[int]:
    """Return the ids of a sample with one token per image instead of its features."""
    ids, found, i = sample.input_ids.tolist(), [], 0
    layouts = iter(layout for _, layout in sample.media)
    while i < len(ids):
        is_image = ids[i] == IMAGE_TOKEN_INDEX
        found.append(image_token if is_image else ids[i])
        i += next(layouts).num_tokens if is_image else 1
    return found


def _answer(found: dict) -> Answer:
    """Convert vLLM's answer. vLLM gives no entropies, so use negative log-probabilities: their expectation is equal."""
    log_probs = tuple(found["log_probs"])
    return Answer(tuple(found["ids"]), log_probs, -sum(log_probs), found["ended"])
