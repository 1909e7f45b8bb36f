"""Compare the answers of servers of an export with run/evaluate.py's: python run/dev/serve_check.py

Every program gets the same held-out questions, greedily, used as its documentation shows, without extra fields that
would repair a prompt. The table counts equal answers.
"""

from llava_ds.runtime.command import Parser, begin, exit_with, given_path, new_folder

if __name__ == "__main__":
    begin("run/dev/serve_check.py")


import argparse
import base64
import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from transformers.models.clip.modeling_clip import CLIPVisionEmbeddings

from llava_ds.config.bounds import Count, number
from llava_ds.constants import IMAGE_TOKEN, ConfigError
from llava_ds.data.images.decode import load_image
from llava_ds.extensions.benchmarks.asking import ask, plan_batches
from llava_ds.extensions.benchmarks.benchmark_files import Given
from llava_ds.extensions.benchmarks.question import Question, without_image
from llava_ds.extensions.benchmarks.tasks import read_questions
from llava_ds.extensions.infer.generate import Answer
from llava_ds.extensions.infer.load import load_model
from llava_ds.runtime.launchers import free_port
from llava_ds.runtime.ranks import Ranks, quiet_libraries
from llava_ds.tiny.default import heldout_data

ROOT = Path(__file__).parents[2]
ROLES = {"system": "system", "human": "user", "gpt": "assistant"}
START_S = 600  # time for a server to start
SHOWN_CHARS = 2000  # shown of the output of a server that fails to start
BATCH_SIZE = 48  # run/evaluate.py's
GGUF_TYPES = ("float32", "float16", "q8_0")
PACKAGES = ("transformers", "torch", "pillow", "fastapi", "uvicorn", "openai")

# Maps a model path, questions and the maximum number of tokens to answers.
Asking = Callable[[str, list[Question], int], list[str]]


def main() -> None:
    args = parse()
    quiet_libraries()
    if not (Path(args.model_path) / "config.json").is_file():
        raise ConfigError(
            f"--model_path {args.model_path}: no config.json there: run make finetune, or give another folder"
        )
    data_path, image_folder = heldout_data("~/.cache/llava_ds")
    questions = read_questions("llava", Given(data_path, image_folder=image_folder), args.questions)
    if args.vllm_python is not None:
        rows = compare({"vLLM": partial(by_vllm, args.vllm_python)}, questions, args)
    elif args.llama_cpp_python is not None:
        rows = compare_llama_cpp(questions, args)
    else:
        rows = compare({name: PATHS[name] for name in args.only or PATHS}, questions, args)
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    if args.output is not None:
        Path(args.output).mkdir(parents=True, exist_ok=True)
        report = {"versions": versions, "model_path": args.model_path, "paths": rows}
        (Path(args.output) / "serve-check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if different := [name for name, row in rows.items() if row["must"] and row["equal"] < row["of"]]:
        raise ConfigError(f"the answers of {', '.join(different)} differ from run/evaluate.py's")


def compare(paths: dict[str, Asking], questions: list[Question], args: argparse.Namespace) -> dict[str, dict]:
    """Run the questions through every path, print the number of answers equal to run/evaluate.py's, and return rows."""
    expected = evaluated(args.model_path, questions, args.max_new_tokens)
    return {name: row(name, asking, questions, expected, args) for name, asking in paths.items()}


def row(
    name: str,
    asking: Asking,
    questions: list[Question],
    expected: list[str],
    args: argparse.Namespace,
    must: bool = True,
) -> dict:
    """Run one path, print how many answers equal the expected ones, and return a row. must: True if all have to."""
    start = time.perf_counter()
    answers = asking(args.model_path, questions, args.max_new_tokens)
    wrong = [i for i, (one, other) in enumerate(zip(expected, answers, strict=True)) if one != other]
    found = {"equal": len(questions) - len(wrong), "of": len(questions), "s": time.perf_counter() - start, "must": must}
    print(f"{name:<42} {found['equal']:>5} of {len(questions)} equal, {found['s']:.0f} s", flush=True)
    for i in wrong[:3]:
        print(f"    {questions[i].asked!r}: {answers[i]!r}, expected {expected[i]!r}")
    return found


def compare_llama_cpp(questions: list[Question], args: argparse.Namespace) -> dict[str, dict]:
    """Run llama.cpp without and with images. In float32, answers with images must equal run/evaluate.py's, either of
    the unchanged model, or of the model with its class token where llama.cpp puts it.

    Answers of float16 may differ, because it also rounds the inputs of matrices, and those of q8_0, a different model.
    """
    rows = {}
    text = [without_image(question) for question in questions]
    of_text, of_images, of_misplaced = (
        evaluated(args.model_path, asked, args.max_new_tokens, misplaced)
        for asked, misplaced in ((text, False), (questions, False), (questions, True))
    )
    for dtype in GGUF_TYPES:
        name, must = f"llama.cpp {dtype}", dtype == "float32"
        asking = partial(by_llama_cpp, args.llama_cpp_python, dtype)
        rows[f"{name}, text"] = row(f"{name}, text", asking, text, of_text, args, must)
        rows[f"{name}, images"] = row(f"{name}, images", asking, questions, of_images, args, False)
        must = must and rows[f"{name}, images"]["equal"] < len(questions)
        misplaced = f"{name}, images, class token misplaced"
        rows[misplaced] = row(misplaced, asking, questions, of_misplaced, args, must)
    return rows


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("--model_path", type=given_path, default="output/tiny-finetune", help="an export (default: %(default)s)")
    add("--questions", type=number(Count), default=60, help="number of held-out questions (default: %(default)s)")
    add("--max_new_tokens", type=number(Count), default=64, help="longest answer (default: %(default)s)")
    add("--only", nargs="+", choices=[*PATHS], help="some of the paths (default: all)")
    add("--vllm_python", type=given_path, help="Python of an environment with vLLM: test only vLLM")
    add("--llama_cpp_python", type=given_path, help="the same for llama.cpp, of the package xllamacpp")
    add("--output", type=new_folder, help="folder for serve-check.json")
    return parser.parse_args()


def evaluated(model_path: str, questions: list[Question], max_new_tokens: int, misplaced: bool = False) -> list[str]:
    """Return the answers from run/evaluate.py's functions, in its batches.

    misplaced: put CLIP's class token where llama.cpp puts it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks, found, loaded = Ranks(0, 0, 1, device), dict[int, Answer](), load_model(model_path)
    if misplaced:
        tower = next(module for module in loaded.model.modules() if isinstance(module, CLIPVisionEmbeddings))
        tower.register_forward_hook(misplace_class_token)
    batches = plan_batches(loaded, questions, BATCH_SIZE, ranks)
    ask(loaded, questions, batches, found.update, ranks, max_new_tokens=max_new_tokens, progress="run/evaluate.py")
    return [found[i].text for i in range(len(questions))]


def misplace_class_token(embeddings: torch.nn.Module, _, hidden: torch.Tensor) -> torch.Tensor:
    """Move the class token after the patches without moving positions: hidden (N, 1 + P, D).

    llama.cpp's tools/mtmd/models/llava.cpp does this, but drops the first row before the projector as the class token.
    Each patch then has its neighbour's position, and the first patch is missing.
    """
    positions = embeddings.position_embedding.weight
    return torch.roll(hidden - positions, -1, dims=1) + positions


def as_chat(question: Question, image_part: Callable[[str], dict]) -> list[dict]:
    """Convert a question to a chat, with images before the text of their message, as in training."""
    images, chat = iter(question.prompt.images), []
    for message in question.prompt.messages:
        marks = message.text.count(IMAGE_TOKEN)
        text = message.text.removeprefix(f"{IMAGE_TOKEN}\n" * marks)
        if IMAGE_TOKEN in text:
            raise ConfigError(
                f"question {question.id} has an image after text, but a chat's parts don't keep that order"
            )
        parts = [image_part(next(images)) for _ in range(marks)] + [{"type": "text", "text": text}]
        chat.append({"role": ROLES[message.role], "content": parts})
    return chat


def loaded_image(path: str) -> dict:
    """Return transformers' message part for an image."""
    return {"type": "image", "image": load_image(path)}


def image_url(path: str) -> dict:
    """Return OpenAI's message part for an image."""
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def by_pipeline(model_path: str, questions: list[Question], max_new_tokens: int) -> list[str]:
    """Answer with transformers' pipeline("image-text-to-text")."""
    from transformers import pipeline

    pipe = pipeline("image-text-to-text", model=model_path, dtype="auto")
    options = {
        "return_full_text": False,
        "generate_kwargs": {"do_sample": False, "max_new_tokens": max_new_tokens},
    }
    found = [pipe(text=as_chat(question, loaded_image), **options) for question in questions]
    return [one[0]["generated_text"].strip() for one in found]


def by_processor(model_path: str, questions: list[Question], max_new_tokens: int, **options: object) -> list[str]:
    """Apply the chat template, run the processor, and generate. options: the processor's."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype="auto").eval()
    processor = AutoProcessor.from_pretrained(model_path)
    answers = []
    for question in questions:
        chat = as_chat(question, loaded_image)
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        images = [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]
        inputs = processor(text=text, images=images or None, return_tensors="pt", **options).to(
            model.device, model.dtype
        )
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(new, skip_special_tokens=True).strip())
    return answers


def by_transformers_serve(model_path: str, questions: list[Question], max_new_tokens: int) -> list[str]:
    """Answer with transformers serve, through the openai client."""
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", model_path, "--port", str(port)]
    with running(command, port, {}):
        return by_client(port, "none", model_path, questions, max_new_tokens)


def by_chat_serve(
    model_path: str, questions: list[Question], max_new_tokens: int, streams: bool = False, engine: str = "hf"
) -> list[str]:
    """Answer with run/chat.py --serve, through the openai client."""
    port, key = free_port(), secrets.token_urlsafe(16)
    command = [sys.executable, str(ROOT / "run" / "chat.py"), "--serve", "--model_path", model_path, "--engine", engine]
    with running([*command, "--port", str(port), "--quiet"], port, {"LLAVA_DS_API_KEY": key}):
        name = os.path.basename(os.path.abspath(model_path))
        return by_client(port, key, name, questions, max_new_tokens, streams)


def by_vllm(python: str, model_path: str, questions: list[Question], max_new_tokens: int) -> list[str]:
    """Answer with vLLM, through the openai client. python: interpreter of vLLM's environment."""
    port = free_port()
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model_path, "--dtype", "float32"]
    # Use only the model in the folder; 1 GiB for keys and values instead of the default 4.
    variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running([*command, "--host", "127.0.0.1", "--port", str(port)], port, variables):
        return by_client(port, "none", model_path, questions, max_new_tokens)


def by_llama_cpp(python: str, dtype: str, model_path: str, questions: list[Question], max_new_tokens: int) -> list[str]:
    """Export as GGUF, and answer with llama.cpp's server and the openai client. python: interpreter with xllamacpp."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        export = [sys.executable, str(ROOT / "run" / "export.py"), model_path, "--format", "gguf", "--dtype", dtype]
        subprocess.run([*export, "--output_dir", folder], check=True, stdout=subprocess.DEVNULL)
        with running([python, str(ROOT / "run/dev/serving/llama_server.py"), folder, str(port)], port, {}):
            return by_client(port, "none", "model", questions, max_new_tokens)


def by_client(
    port: int, key: str, name: str, questions: list[Question], max_new_tokens: int, streams: bool = False
) -> list[str]:
    """Answer with the official client, one question after the other."""
    import openai

    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=300)
    answers = []
    for question in questions:
        chat = as_chat(question, image_url)
        options = {"model": name, "messages": chat, "temperature": 0, "max_tokens": max_new_tokens}
        if streams:
            choices = [chunk.choices for chunk in client.chat.completions.create(**options, stream=True)]
            text = "".join(found[0].delta.content or "" for found in choices if found)
        else:
            text = client.chat.completions.create(**options).choices[0].message.content
        answers.append(text.strip())
    return answers


@contextlib.contextmanager
def running(command: list[str], port: int, variables: dict[str, str]) -> Iterator[None]:
    """Start a server, wait until /health answers, and stop it at the end. Raises ConfigError with its last output."""
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            end = time.monotonic() + START_S
            while not _is_healthy(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    said = log.read().decode(errors="replace")[-SHOWN_CHARS:]
                    raise ConfigError(f"{' '.join(command)} does not listen (exit code {server.poll()}):\n{said}")
                time.sleep(0.2)
            yield
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


PATHS: dict[str, Asking] = {
    "pipeline": by_pipeline,
    "template, then processor": by_processor,
    "the same, no special tokens": lambda *given: by_processor(*given, add_special_tokens=False),  # like vLLM
    "transformers serve": by_transformers_serve,
    "run/chat.py --serve": by_chat_serve,
    "the same, streamed": lambda *given: by_chat_serve(*given, streams=True),
    "the same, deepspeed": lambda *given: by_chat_serve(*given, engine="deepspeed"),
}

if __name__ == "__main__":
    exit_with(main, "run/dev/serve_check.py")
