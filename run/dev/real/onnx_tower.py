"""Convert a DINOv2 from an ONNX file to a folder for transformers.

torch's exporter keeps the names of most parameters. It transposes linear weights and numbers them: the name of the node
that multiplies by a weight identifies it. Position embeddings have two parts: the class token's and the patches'.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message
from safetensors.torch import save_file
from transformers import Dinov2Config, Dinov2Model

# ONNX message fields to read: name, number, type (protobuf's number, or a message's name), repeated.
_INT64, _STRING, _BYTES = 3, 9, 12
_MESSAGES = {
    "TensorProto": (("dims", 1, _INT64, True), ("data_type", 2, _INT64, False), ("name", 8, _STRING, False),
                    ("raw_data", 9, _BYTES, False)),
    "NodeProto": (("input", 1, _STRING, True), ("name", 3, _STRING, False), ("op_type", 4, _STRING, False)),
    "GraphProto": (("node", 1, "NodeProto", True), ("initializer", 5, "TensorProto", True)),
    "ModelProto": (("graph", 7, "GraphProto", False),),
}  # fmt: skip
_FLOAT = 1  # TensorProto.DataType
PREFIX = "backbone."
PROCESSOR = {
    "image_processor_type": "BitImageProcessor", "do_convert_rgb": True, "do_resize": True, "do_center_crop": False,
    "do_rescale": True, "do_normalize": True, "resample": 3,
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


def onnx_message() -> Message:
    """Return an empty ModelProto with the fields above."""
    file = descriptor_pb2.FileDescriptorProto(name="onnx_parts.proto", package="onnx_parts", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            added = message.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                added.type, added.type_name = 11, f".onnx_parts.{kind}"
            else:
                added.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx_parts.ModelProto"))()


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Read the backbone's tensors by transformers' on-disk DINOv2 names. Raises ValueError without positions."""
    model = onnx_message()
    model.ParseFromString(file.read_bytes())
    tensors = {each.name: _to_tensor(each) for each in model.graph.initializer if each.data_type == _FLOAT}
    weights = {name.removeprefix(PREFIX): each for name, each in tensors.items() if name.startswith(PREFIX)}
    for node in model.graph.node:
        layer = node.name.strip("/").replace("/", ".").removesuffix(".MatMul")
        if node.op_type == "MatMul" and layer.startswith(PREFIX) and node.input[1] in tensors:
            weights[f"{layer.removeprefix(PREFIX)}.weight"] = tensors[node.input[1]].T.contiguous()
    width = weights["embeddings.cls_token"].shape[-1]
    unnamed = [each for name, each in tensors.items() if name.startswith("onnx::") and each.shape[::2] == (1, width)]
    positions = sorted((each for each in unnamed if each.ndim == 3), key=lambda each: each.shape[1])
    if len(positions) != 2:
        raise ValueError(f"{file}: {len(positions)} tensors look like position embeddings, expected 2")
    weights["embeddings.position_embeddings"] = torch.cat(positions, 1)
    return weights


def _to_tensor(stored: Message) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(stored.raw_data, np.float32).reshape(tuple(stored.dims)).copy())


def convert_dinov2(file: Path, folder: Path, size: int) -> None:
    """Write the tower, and an image processor for squares of size pixels."""
    weights = read_weights(file)
    patches = weights["embeddings.patch_embeddings.projection.weight"]
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    config = Dinov2Config(
        hidden_size=patches.shape[0],
        num_hidden_layers=layers,
        num_attention_heads=patches.shape[0] // 64,
        mlp_ratio=weights["encoder.layer.0.mlp.fc1.bias"].shape[0] // patches.shape[0],
        patch_size=patches.shape[-1],
        image_size=patches.shape[-1] * math.isqrt(weights["embeddings.position_embeddings"].shape[1] - 1),
    )
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | {"size": {"height": size, "width": size}}))
    weights.setdefault("embeddings.mask_token", torch.zeros(1, config.hidden_size))  # used only in pretraining
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _, loaded = Dinov2Model.from_pretrained(folder, output_loading_info=True)
    if problems := {kind: names for kind, names in loaded.items() if names}:
        raise ValueError(f"{file}: its tensors don't make a DINOv2: {problems}")
