"""Model folders as a stranger might make them: a good toy folder, one or two mutations drawn from a seed."""

import io
import json
import os
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

BAD_VALUES = (
    "x", "", None, True, False, [], {}, [1], {"a": 1}, 0, -1, 1, 3, 7, 10**9, 2**31, 2**63, 10**30, -(2**40), 1.5,
    1e308, float("inf"), float("nan"), "\ud800", "../../secret", "/etc/passwd", "x" * 100_000, [[]] * 1000,
    "somebody/kernel", [None], ["a", 1], "\x00", {"__class__": 1},
)  # fmt: skip
# Keys that a folder may have though the good one has not: they make libraries look elsewhere, or do more.
MORE_KEYS = {
    "config.json": (
        "auto_map", "configuration_files", "quantization_config", "_attn_implementation", "attn_implementation",
        "num_labels", "id2label", "label2id", "rope_scaling", "rope_parameters", "layer_types", "head_dim",
        "sliding_window", "tie_word_embeddings", "dtype", "torch_dtype", "pad_token_id", "transformers_version",
        "problem_type", "is_encoder_decoder", "llava_ds_version", "llava_ds_pictures", "llava_ds_vocab_size",
        "llava_ds_chat_template", "mm_vision_tower", "mm_hidden_size", "image_grid_pinpoints", "_name_or_path",
        "transformers_weights", "use_kernels", "torchscript", "pruned_heads", "chunk_size_feed_forward", "name_or_path",
    ),
    "tokenizer_config.json": (
        "auto_map", "tokenizer_class", "tokenizer_file", "vocab_file", "added_tokens_decoder", "chat_template",
        "extra_special_tokens", "additional_special_tokens", "model_max_length", "fast_tokenizer_files", "init_inputs",
        "gguf_file", "padding_side", "truncation_side", "response_schema", "processor_class", "legacy", "name_or_path",
    ),
    "special_tokens_map.json": ("vocab_file", "tokenizer_file", "bos_token", "unk_token", "additional_special_tokens"),
    "generation_config.json": (
        "num_beams", "eos_token_id", "pad_token_id", "max_length", "cache_implementation", "repetition_penalty",
        "watermarking_config", "custom_generate", "num_return_sequences", "stop_strings", "temperature",
    ),
    "adapter_config.json": (
        "alpha_pattern", "rank_pattern", "base_model_name_or_path", "peft_type", "r", "lora_alpha", "use_dora",
        "auto_mapping", "modules_to_save",
    ),
    "preprocessor_config.json": ("image_mean", "image_std", "size", "crop_size", "do_pad", "do_center_crop"),
    "processor_config.json": ("image_processor", "chat_template", "auto_map"),
}  # fmt: skip
TEMPLATES = (
    "{{ 1 / 0 }}", "{{ 'x' * 3000000000 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('no') }}", "{" * 10_000, "\x00", "",
    "{{ cycler.__init__.__globals__.os.system('touch RAN') }}", "{{ [1] * 10**9 }}", "{% include '/etc/passwd' %}",
    "{{ 'x' | center(90000000) }}", "{{ 10**10**8 }}", "{{ messages[99].content }}", "{{ ('a' * 9999) * 99999 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ lipsum(9999999) }}",
    "{% generation %}{{ messages }}{% endgeneration %}", "{% for m in messages %}x{% endfor %}", "(" * 5000,
    "{{ " + "(" * 3000 + ")" * 3000 + " }}", "{% if a %}" * 500 + "{% endif %}" * 500, "x" * 2_000_000,
)  # fmt: skip


def read_object(file: Path) -> dict | None:
    """The JSON object that earlier mutations left; None where it is no JSON object any more."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class Runs:
    """A pickle with code that creates a file when it runs."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return (os.system, (f"touch {self.ran}",))


class Mutations:
    """Make one change to a folder. secret: a file outside it that must not be opened; ran: the file that code would
    create."""

    def __init__(self, rng: random.Random, secret: Path, ran: Path) -> None:
        self.rng, self.secret, self.ran = rng, secret, ran
        self.kinds: tuple[Callable[[Path], str | None], ...] = (
            self.value, self.value, self.value, self.more_key, self.more_key, self.nest, self.whole_file, self.bytes,
            self.index, self.index, self.link, self.special_file, self.header, self.header, self.tensors, self.pickled,
            self.template, self.template, self.tokenizer, self.sentencepiece, self.remove,
        )  # fmt: skip

    def apply(self, folder: Path) -> str:
        """Make one or two changes; return a description."""
        done: list[str] = []
        for _ in range(100):
            if len(done) > self.rng.random() * 1.3:
                break
            if said := self.rng.choice(self.kinds)(folder):
                done.append(said)
        return "; ".join(done)

    def _file(self, folder: Path, *patterns: str) -> Path | None:
        files = sorted(f for p in patterns for f in folder.glob(p) if f.is_file() and not f.is_symlink())
        return self.rng.choice(files) if files else None

    def _json(self, folder: Path) -> tuple[Path, dict] | tuple[None, None]:
        names = (
            "config.json",
            "config.json",
            "*_config.json",
            "special_tokens_map.json",
            "tokenizer_config.json",
            "*.json",
        )
        file = self._file(folder, self.rng.choice(names))
        content = file and read_object(file)
        return (file, content) if content else (None, None)

    def value(self, folder: Path) -> str | None:
        file, content = self._json(folder)
        if not content:
            return None
        where, path = content, []
        while True:
            key = self.rng.choice(list(where))
            path.append(key)
            if isinstance(where[key], dict) and where[key] and self.rng.random() < 0.8:
                where = where[key]
            else:
                break
        where[key] = self.rng.choice(BAD_VALUES)
        file.write_text(json.dumps(content))
        return f"{file.name} {'.'.join(path)} = {str(ascii(where[key]))[:40]}"

    def more_key(self, folder: Path) -> str | None:
        file = folder / self.rng.choice(list(MORE_KEYS))
        if not file.is_file() or file.is_symlink():
            return None
        if (content := read_object(file)) is None:
            return None
        key = self.rng.choice(MORE_KEYS[file.name])
        content[key] = self.rng.choice((*BAD_VALUES, str(self.secret), f"../{self.secret.name}", [str(self.secret)]))
        if key == "configuration_files":
            content[key] = ["../config.4.0.0.json"]
        if key in ("alpha_pattern", "rank_pattern") and self.rng.random() < 0.5:
            content[key] = {"(a*)*(.*)*b": 4, ".*.*.*.*.*.*.*x": 2}
        file.write_text(json.dumps(content))
        return f"{file.name} {key} = {str(ascii(content[key]))[:40]}"

    def nest(self, folder: Path) -> str | None:
        file, content = self._json(folder)
        if content is None:
            return None
        depth, key = self.rng.choice((100, 900, 5000, 200_000)), self.rng.choice([*content, "x"])
        opening, closing = self.rng.choice((("[", "]"), ('{"a":', "}")))
        rest = json.dumps({k: v for k, v in content.items() if k != key})[1:]
        inner = opening * depth + "1" + closing * depth
        file.write_text(f"{{{json.dumps(key)}: {inner}{',' if len(rest) > 1 else ''}{rest}")
        return f"{file.name} {key} nested {depth}"

    def whole_file(self, folder: Path) -> str | None:
        file = self._file(folder, "*.json", "*.jinja")
        if file is None:
            return None
        text = self.rng.choice(("[]", "null", "1", '""', "{}", "", "{", "NaN", "[" * 100_000, '{"a": 1' + "0" * 9999))
        file.write_text(text)
        return f"{file.name} is {text[:20]}"

    def bytes(self, folder: Path) -> str | None:
        file = self._file(folder, "*")
        if file is None or not file.stat().st_size:
            return None
        content = bytearray(file.read_bytes())
        how = self.rng.choice(("cut", "flip", "utf-16", "zeros"))
        if how == "cut":
            content = content[: self.rng.randrange(len(content))]
        elif how == "flip":
            for _ in range(self.rng.choice((1, 20))):
                content[self.rng.randrange(min(len(content), 5000))] = self.rng.randrange(256)
        elif how == "utf-16":
            content = bytearray(b"\xff\xfe" + bytes(content))
        else:
            content = bytearray(len(content))
        file.write_bytes(content)
        return f"{file.name} {how}"

    def index(self, folder: Path) -> str | None:
        weights = self._file(folder, "*.safetensors", "*.bin")
        if weights is None:
            return None
        kind = self.rng.choice(("model.safetensors", "pytorch_model.bin"))
        name = self.rng.choice(
            (f"../{self.secret.name}", str(self.secret), "..", "/dev/zero", "a/../../x", "config.json", weights.name, 5,
             [], None, "\x00", "x" * 5000)
        )  # fmt: skip
        map_ = self.rng.choice(({"a": name}, {"lm_head.weight": name}, [name], name, {}))
        (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": map_}))
        return f"{kind}.index.json names {str(ascii(name))[:40]}"

    def link(self, folder: Path) -> str | None:
        file = self._file(folder, "*")
        if file is None:
            return None
        target = self.secret.parent / f"outside-{file.name}"
        target.write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(self.rng.choice((target, self.secret, Path("/dev/zero"), Path("nowhere"), Path(file.name))))
        return f"{file.name} -> {os.readlink(file)}"

    def special_file(self, folder: Path) -> str | None:
        file = self._file(folder, "*")
        if file is None:
            return None
        file.unlink()
        if self.rng.random() < 0.5:
            os.mkfifo(file)
            return f"{file.name} is a FIFO"
        file.mkdir()
        return f"{file.name} is a folder"

    def header(self, folder: Path) -> str | None:
        file = self._file(folder, "*.safetensors")
        if file is None or file.stat().st_size < 16:
            return None
        raw = file.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        try:
            header = json.loads(raw[8 : 8 + length])
        except (ValueError, RecursionError):  # changed before
            return None
        name = self.rng.choice([key for key in header if key != "__metadata__"] or ["x"])
        entry = header.setdefault(name, {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]})
        how = self.rng.choice(("length", "offsets", "shape", "dtype", "name", "overlap", "huge shape", "deep"))
        if how == "length":
            file.write_bytes(struct.pack("<Q", self.rng.choice((2**63, 10**8, 2**32, 1, 0))) + raw[8:])
            return f"{file.name} header length"
        if how == "deep":
            text = b"[" * 100_000
            file.write_bytes(struct.pack("<Q", len(text)) + text)
            return f"{file.name} header nested"
        if how == "offsets":
            entry["data_offsets"] = self.rng.choice(([0, 2**62], [-4, 0], [8, 0], "x", [0], [1.5, 3]))
        elif how in ("shape", "huge shape"):
            entry["shape"] = self.rng.choice(
                ([-1, 4], [2**62, 2**62], [0, 2**62], [1] * 200, "x", [2**40], [], [1.5], [10**30])
            )
        elif how == "dtype":
            entry["dtype"] = self.rng.choice(("F8_E8M0", "F4", "X", 5, "BOOL", "I64", "F64", "C64"))
        elif how == "name":
            header[self.rng.choice(("", "\ud800", "x" * 9999, "model.layers.99.a.weight"))] = header.pop(name)
        else:
            others = [key for key in header if key not in (name, "__metadata__")]
            if others:
                entry["data_offsets"] = header[self.rng.choice(others)]["data_offsets"]
        text = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        return f"{file.name} {name} {how} {str(ascii(header.get(name)))[:80]}"

    def _rewritten(self, folder: Path, change: Callable[[dict], object]) -> str | None:
        """Change a pickled weight file, or a projector's file."""
        file = self._file(folder, "*.bin", "model.safetensors", "*.pt")
        if file is None:
            return None
        try:
            if file.suffix in (".bin", ".pt"):
                tensors = torch.load(file, weights_only=file.suffix == ".bin")  # DeepSpeed's hold classes of its own
            else:
                from safetensors.torch import load_file

                tensors = load_file(file)
                file.unlink()
                file = folder / "pytorch_model.bin"
        except Exception:  # broken by the mutation before this one
            return None
        with file.open("wb") as out:
            changed = change(tensors)
            pickle.dump(changed, out) if isinstance(changed, Runs) else torch.save(changed, out)
        return file.name

    def tensors(self, folder: Path) -> str | None:
        how = self.rng.choice(
            ("expanded", "sparse", "meta", "int", "list", "nested", "names", "complex", "empty", "nan")
        )

        def change(tensors: dict) -> object:
            name = self.rng.choice(list(tensors) or ["x"])
            old = tensors.get(name)
            old = old if isinstance(old, torch.Tensor) else torch.zeros(2, 2)
            if how == "list":
                return list(tensors.values())
            if how == "nested":
                return {"state_dict": tensors}
            if how == "names":
                return {i: tensor for i, tensor in enumerate(tensors.values())}
            if how == "empty":
                return {}
            tensors[name] = {
                "expanded": lambda: torch.zeros(1).expand(10**6, 10**6),
                "sparse": lambda: torch.zeros(old.shape).to_sparse(),
                "meta": lambda: torch.zeros(old.shape, device="meta"),
                "int": lambda: 5,
                "complex": lambda: old.to(torch.complex64),
                "nan": lambda: torch.full(old.shape, float("nan")),
            }[how]()
            return tensors

        name = self._rewritten(folder, change)
        return name and f"{name} with {how} tensors"

    def pickled(self, folder: Path) -> str | None:
        how = self.rng.choice(("code", "inside", "zip bomb", "bare"))
        if how == "zip bomb":
            with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as zipped:
                zipped.writestr("archive/data.pkl", b"\x80\x02" + b"0" * 10**8)
                zipped.writestr("archive/version", b"3")
            (folder / "model.safetensors").unlink(missing_ok=True)
            return "pytorch_model.bin is a zip bomb"
        if how == "bare":
            stream = io.BytesIO()
            pickle.dump([Runs(self.ran)] * 3, stream)
            (folder / "pytorch_model.bin").write_bytes(stream.getvalue())
            (folder / "model.safetensors").unlink(missing_ok=True)
            return "pytorch_model.bin is a pickle with code"
        code = Runs(self.ran)
        name = self._rewritten(folder, lambda tensors: code if how == "code" else {**tensors, "x": code})
        return name and f"{name} with code ({how})"

    def template(self, folder: Path) -> str | None:
        if not (folder / "tokenizer.json").exists():
            return None
        template = self.rng.choice(TEMPLATES)
        place = self.rng.choice(("jinja", "tokenizer_config.json", "chat_template.json", "more"))
        if place == "jinja":
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            (folder / "chat_template.jinja").write_text(template)
        elif place == "more":
            (folder / "additional_chat_templates").mkdir(exist_ok=True)
            (folder / "additional_chat_templates" / "default.jinja").write_text(template)
        else:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
            file = folder / place
            if (content := read_object(file) if file.is_file() else {}) is None:
                return None
            value = self.rng.choice((template, template, [{"name": "default", "template": template}], 5, [], {"a": 1}))
            content["chat_template"] = value
            file.write_text(json.dumps(content))
        return f"chat template in {place}: {str(ascii(template))[:60]}"

    def tokenizer(self, folder: Path) -> str | None:
        file = folder / "tokenizer.json"
        content = read_object(file) if file.is_file() else None
        if content is None or not isinstance(content.get("model"), dict):
            return None
        how = self.rng.choice(("section", "vocab", "merges", "added", "padding", "truncation", "regex", "post"))
        if how == "section":
            content[self.rng.choice(list(content))] = self.rng.choice([v for v in BAD_VALUES if v == v])
        elif how == "vocab":
            content["model"]["vocab"] = self.rng.choice(({}, {"a": 0}, {"a": -1}, {"a": 2**31}, [], {"a": 1, "b": 1}))
        elif how == "merges":
            content["model"]["merges"] = self.rng.choice(([["x", "y"]], ["a"], [[]], 5, ["a b"] * 10))
        elif how == "added":
            token = {"content": "x", "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
                     "special": True}  # fmt: skip
            content["added_tokens"] = [{"id": self.rng.choice((0, 10**9, -1, 4 * 10**9)), **token}] * 2
        elif how == "padding":
            content["padding"] = {"strategy": {"Fixed": 10**11}, "direction": "Right", "pad_to_multiple_of": None,
                                  "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}  # fmt: skip
        elif how == "truncation":
            content["truncation"] = {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9}
        elif how == "regex":
            pattern = {"Regex": self.rng.choice(("(a*)*b", "(", "(x+x+)+y", "(?<=a+)b", "[" * 500))}
            content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        else:
            content["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "no",
                                         "type_id": 0}}], "pair": [], "special_tokens": {}}  # fmt: skip
        file.write_text(json.dumps(content))
        return f"tokenizer.json {how}"

    def sentencepiece(self, folder: Path) -> str | None:
        if not (folder / "tokenizer.json").exists():
            return None
        content = self.rng.choice(
            (b"", b"\x0a\xff\xff\xff\xff\x0f", self.rng.randbytes(100), b"IQ== 0\nIg== 1\n", b"\x00" * 999)
        )
        (folder / "tokenizer.model").unlink(missing_ok=True)
        (folder / "tokenizer.model").write_bytes(content)
        if self.rng.random() < 0.5:
            (folder / "tokenizer.json").unlink()
        return f"tokenizer.model is {content[:8]!r}"

    def remove(self, folder: Path) -> str | None:
        file = self._file(folder, "*")
        if file is None:
            return None
        file.unlink()
        return f"no {file.name}"
