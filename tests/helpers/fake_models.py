"""Models, micro-batches and an engine on a fake GPU (fake_gpu.py), made by the project's own code."""

import functools
import inspect
import sys
import types
from dataclasses import replace

import pytest
import torch
import toys
from fake_gpu import CUDA, stand_in
from transformers import CLIPVisionConfig, PreTrainedConfig, Siglip2VisionConfig, SiglipVisionConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.constants import IGNORE_INDEX, IMAGE_TOKEN_INDEX
from llava_ds.data.collate import LoadedSample
from llava_ds.data.loader import MicroBatch, micro_batches
from llava_ds.engine.construct import construction
from llava_ds.engine.param_groups import choose_trainable
from llava_ds.geometry import ImageOptions, media_layout
from llava_ds.model.llava import LlavaModel, assemble
from llava_ds.model.open.tower import plan_tower
from llava_ds.model.vision import TowerPlan
from llava_ds.runtime.mesh import Mesh
from llava_ds.videos import Footage

SQUARE = {"image_size": toys.IMAGE_SIZE, "patch_size": toys.PATCH_SIZE}
TOWERS = {
    "clip": CLIPVisionConfig(**toys.TOWER, **SQUARE),
    "siglip": SiglipVisionConfig(**toys.TOWER, **SQUARE),
    "siglip2": Siglip2VisionConfig(**toys.TOWER, num_patches=9, patch_size=toys.PATCH_SIZE),
    **{kind: toys.tower_config(kind) for kind in toys.TOWERS},
}


def arguments(**flags: object) -> Arguments:
    """The model's flags, and defaults for the other flags."""
    return Arguments(ModelArguments(), DataArguments(), TrainingArguments(), frozenset()).replaced(**flags)


def tower_plan(kind: str, args: Arguments) -> TowerPlan:
    """Plan of one tower, or of two joined by +."""
    first, *others = (plan_tower(TOWERS[each], {}, "here", args.model) for each in kind.split("+"))
    return replace(first, second=others[0]) if others else first


def built(
    text: PreTrainedConfig,
    tower: TowerPlan,
    args: Arguments,
    dtype: torch.dtype = torch.bfloat16,
    short: bool = False,
    value_head: bool = False,
) -> LlavaModel:
    """The composition on the fake GPU, as training builds and freezes it, uninitialised."""
    images = tower.images
    mean, std = (torch.tensor(values, device=CUDA) for values in (images.mean, images.std))
    with construction({}, dtype, CUDA, zero3=False):
        model = assemble(text, tower, args.model, mean, std, value_head)
    if short:
        model.shorten_last_layer()
    if (flags := args.own.get("lora")) is not None:
        from llava_ds.extensions.lora.layers import add_lora, lora_layout

        if flags.packs:
            _pack(model, flags, dtype)
        with CUDA, pytest.MonkeyPatch.context() as patch:  # made there: fake parameters can't be moved
            patch.setattr(torch.nn.Module, "to", lambda module, *_, **__: module)
            add_lora(model, lora_layout(model, args.model, None, text), args.model, seed=0)
    choose_trainable(model, args)
    return model.train()


def _pack(model: LlavaModel, flags: object, dtype: torch.dtype) -> None:
    """Quantize to 4 bits as training does, by bitsandbytes' own operations. A plain parameter replaces its tensor
    class, because fake tensors can't have that class.
    """
    from bitsandbytes.functional import quantize_4bit

    from llava_ds.extensions.lora.layers import linear_names
    from llava_ds.extensions.lora.quantize import BLOCK, quantize_layers

    llm = model.language_model
    names = linear_names(llm)
    weights = {name: torch.empty_like(llm.get_submodule(name).weight) for name in names}
    quantize_layers(llm, names, flags, dtype)
    for name, weight in weights.items():
        layer = llm.get_submodule(name)
        options = {"quant_type": flags.quant_type, "compress_statistics": flags.double_quant}
        packed, state = quantize_4bit(weight, blocksize=BLOCK, **options)
        layer.weight = torch.nn.Parameter(packed, requires_grad=False)
        layer.weight.quant_state = layer.quant_state = state
        layer.weight.bnb_quantized = True


def sample(options: ImageOptions, num_text: int, media: list[tuple[str, tuple]] = (), source: int = 0) -> LoadedSample:
    """Images and videos (kind, sizes, and footage where these are cells), then text of which the second half is
    supervised."""
    layouts = [media_layout(kind, sizes, len(media), options, *footage) for kind, sizes, *footage in media]
    side = options.size
    heights = [side * (options.video.moment if layout.is_video else 1) for layout in layouts]
    tiles = [torch.zeros(one.num_tiles, 3, high, side, dtype=torch.uint8) for one, high in zip(layouts, heights)]
    marks = torch.full((sum(layout.num_tokens for layout in layouts),), IMAGE_TOKEN_INDEX)
    ids = torch.cat([torch.ones(1, dtype=torch.int64), marks, torch.full((num_text,), 5)])
    labels = torch.where(torch.arange(len(ids)) < len(ids) - num_text // 2, IGNORE_INDEX, ids)
    return LoadedSample(ids, labels, list(zip(tiles, layouts)), source)


class Samples(list):
    """What micro_batches takes of a data set."""

    def __init__(self, samples: list, options: ImageOptions) -> None:
        super().__init__(samples)
        self.image_options = options


def on_gpu(samples: list, options: ImageOptions, batches: list[list[int]] | None = None) -> list[MicroBatch]:
    """Micro-batches on the fake GPU, collated and moved by the loader; all samples in one by default."""
    numbers = batches or [list(range(len(samples)))]
    return list(micro_batches(Samples(samples, options), numbers, 0, CUDA, Mesh(1, 0)))


class Engine:
    """The part of a DeepSpeed engine's interface that the loop, eval and warm-up call, around a model."""

    def __init__(self, model: LlavaModel) -> None:
        self.module, self.device, self.skipped_steps = model, CUDA, 0
        self.optimizer = types.SimpleNamespace(param_groups=[{"lr": 1e-3}])
        self.calls: list[str] = []

    def __call__(self, *args: object, **options: object):
        return self.module(*args, **options)

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self.calls.append(f"boundary {is_last}")

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        assert loss.dtype in (torch.float32, torch.float64) and loss.is_cuda and not scale_wrt_gas
        loss.backward()

    def step(self) -> None:
        self.calls.append("step")

    def get_global_grad_norm(self) -> torch.Tensor:
        return torch.zeros((), device=CUDA)


def backward(model: LlavaModel, loss: torch.Tensor) -> None:
    """Run backward, and check that all that trains has a gradient like it, and nothing else has one."""
    loss.backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert (gradient is not None) == parameter.requires_grad, name
        if gradient is not None:
            assert (gradient.device, gradient.dtype, gradient.shape) == (
                parameter.device, parameter.dtype, parameter.shape
            ), name  # fmt: skip


class _Flash(torch.autograd.Function):
    """Fake flash-attn varlen kernels: their arguments, saved tensors and results."""

    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens_q, cu_seqlens_k):
        out = torch.empty_like(q)
        sums = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, sums, cu_seqlens_q, cu_seqlens_k)
        return out

    @staticmethod
    def backward(ctx, upstream):
        q, k, v, out, *_ = ctx.saved_tensors
        assert upstream.dtype == out.dtype and upstream.shape == out.shape
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None, None


def _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal) -> torch.Tensor:
    assert q.dim() == k.dim() == v.dim() == 3 and q.shape[1] % k.shape[1] == 0 and k.shape == v.shape
    assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16} or {q.dtype, k.dtype, v.dtype} <= {torch.float16}
    assert q.shape[2] <= 256 and q.shape[2] % 8 == 0 and all(x.stride(-1) == 1 and x.is_cuda for x in (q, k, v))
    for starts in (cu_seqlens_q, cu_seqlens_k):
        assert starts.dtype == torch.int32 and starts.is_cuda and starts.is_contiguous() and starts.dim() == 1
    assert type(max_seqlen_q) is int and type(max_seqlen_k) is int and type(causal) is bool
    assert causal or len(cu_seqlens_q) == len(cu_seqlens_k)
    return _Flash.apply(q, k, v, cu_seqlens_q, cu_seqlens_k)


def flash_attn_2():
    """The package flash_attn with the signature of 2.8's function."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert len(window_size) == 2 and isinstance(softcap, float) and not (softcap and dropout_p)
        return _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)

    return _counting(stand_in("flash_attn"), flash_attn_varlen_func)


def flash_attn_3():
    """The module flash_attn_interface with the signature of flash-attn 3's function."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        assert len(window_size) == 2 and isinstance(softcap, float)
        return _flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal)

    return _counting(stand_in("flash_attn_interface"), flash_attn_varlen_func)


def _counting(module: types.ModuleType, function) -> types.ModuleType:
    """The module with the function, and calls: how often it was called."""

    @functools.wraps(function)
    def counted(*args, **options):
        module.calls += 1
        return function(*args, **options)

    module.calls, module.flash_attn_varlen_func = 0, counted
    return module


class _DeltaRule(torch.autograd.Function):
    """Fake chunks of flash-linear-attention: the tensors that they save besides their arguments, and their results."""

    @staticmethod
    def forward(ctx, query, key, value, g, beta):
        inverses = key.new_empty(*value.shape[:3], 64)  # a triangular matrix of each chunk of 64 tokens
        ctx.save_for_backward(query, key, value, torch.empty_like(g), beta, inverses)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx, upstream):
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors[:5])


def delta_net_kernels(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Let flash-linear-attention and causal-conv1d seem installed. Returns how often each is called."""
    from llava_ds.extensions.ready import delta_net

    calls = {"rule": 0, "convolution": 0}

    def rule(query, key, value, g, beta, cu_seqlens, cu_seqlens_cpu, **_):
        calls["rule"] += 1
        assert query.dtype == key.dtype == value.dtype == torch.bfloat16 and g.dtype == torch.float32
        assert cu_seqlens.is_cuda and cu_seqlens.dtype == torch.int32 and cu_seqlens_cpu.device.type == "cpu"
        return _DeltaRule.apply(query, key, value, g, beta), None

    def convolution(hidden_states, weight, bias, activation, seq_idx, **_):
        calls["convolution"] += 1
        assert hidden_states.stride(1) == 1 and bias is None and activation == "silu"  # it takes seq_idx in this layout
        assert seq_idx.is_cuda and seq_idx.dtype == torch.int32 and seq_idx.shape == (1, hidden_states.shape[2])
        return _Fused.apply(hidden_states, weight)

    for name, kernel in (("torch_chunk_gated_delta_rule", rule), ("causal_conv1d_fn", convolution)):
        kernel.__wrapped__ = inspect.unwrap(getattr(modeling_qwen3_5, name))  # on the CPU, trials need it
        patch.setattr(modeling_qwen3_5, name, delta_net.by_device(kernel))
    patch.setattr(delta_net, "missing_kernels", lambda: None)
    return calls


class _Fused(torch.autograd.Function):
    """One of Liger's kernels: a result and gradients like its inputs."""

    @staticmethod
    def forward(ctx, like, *others):
        ctx.save_for_backward(like, *others)
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx, upstream):
        return tuple(torch.empty_like(saved) for saved in ctx.saved_tensors)


def liger() -> list[types.ModuleType]:
    """A fake liger_kernel with the functions that liger.py calls. It puts kernels into an instance as Liger does."""

    def norm(self, hidden):
        assert hidden.is_cuda and hidden.dtype == self.weight.dtype
        return _Fused.apply(hidden, self.weight)

    def mlp(self, x):
        return self.down_proj(_Fused.apply(self.gate_proj(x), self.up_proj(x)))

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        assert q.dim() == k.dim() == 4 and cos.shape == sin.shape and q.is_cuda and cos.is_cuda
        return _Fused.apply(q), _Fused.apply(k)

    def apply(model, cross_entropy, fused_linear_cross_entropy):
        assert not cross_entropy and not fused_linear_cross_entropy
        family = sys.modules[type(model).__module__]
        family.apply_rotary_pos_emb = rotary
        for module in model.modules():
            kind = type(module).__name__
            if kind.endswith("RMSNorm"):
                module.forward = types.MethodType(norm, module)
            elif kind.endswith("MLP"):
                module.forward = types.MethodType(mlp, module)

    patches = stand_in(
        "liger_kernel.transformers.monkey_patch",
        _apply_liger_kernel_to_instance=apply,
        MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None, "qwen2": None, "mistral": None},
    )
    return [stand_in("liger_kernel"), stand_in("liger_kernel.transformers"), patches]


IMAGE = ("image", ((40, 30),))
CLIP = ("frames", ((40, 30),) * 5, Footage(5, 1.0))


def talks(options) -> list:
    """Samples with one image, with text alone, and with two images; with a video, if the options have a rule for it."""
    found = [sample(options, 9, [IMAGE]), sample(options, 30), sample(options, 14, [IMAGE] * 2, source=1)]
    if options.video is not None:
        found.append(sample(options, 12, [CLIP, IMAGE]))
    return found
