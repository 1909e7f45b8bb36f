"""Choose the parameters to train, make the optimizer's groups with their learning rates, and print a table of them."""

from torch import nn

from llava_ds.config.arguments import Arguments, trained_parts, trains_new_rows
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.optimizer import optimizer_name
from llava_ds.extensions.active import active
from llava_ds.model.llava import LlavaModel, all_models
from llava_ds.model.open.loading import is_packed, num_packed
from llava_ds.model.open.names import OWN


def choose_trainable(model: LlavaModel, args: Arguments) -> None:
    """Freeze everything except trained_parts (of some parts only the last layers) and the parameters of extensions.

    If images are wrapped in start and end tokens, stage 1 also trains all input embeddings, like LLaVA, unless the
    output layer is tied to them. The newline embedding trains with the projector or the language model (LLaVA's own
    stage 1 leaves it at its random values). A value head always trains. The output layer of a model with a value head
    never trains, because the loss uses no logits. Raises ConfigError if nothing is left to train.
    """
    parts = trained_parts(args.model)
    model.vision_tower.requires_grad_("vision_tower" in parts)
    model.projector.requires_grad_("projector" in parts)
    if hasattr(model, "newline"):
        model.newline.requires_grad_(bool(parts & {"projector", "language_model", "output_layer"}))
    for parameter in model.language_model.parameters():
        parameter.requires_grad_("language_model" in parts and parameter.is_floating_point())  # packed: frozen
    for wrap in active(args.model.own).wraps:
        wrap.trains(model, args.model)
    if args.model.unfreeze_topk_vision:
        _leave_last_layers(model.vision_tower.tower, args.model.unfreeze_topk_vision)
    if args.model.unfreeze_topk_llm:
        _leave_last_layers(model.language_model, args.model.unfreeze_topk_llm)
    if "output_layer" in parts:
        inputs, outputs = model.language_model.get_input_embeddings(), model.language_model.get_output_embeddings()
        outputs.requires_grad_(outputs.weight is not inputs.weight)  # a tied one stays frozen, as in LLaVA
    if trains_new_rows(args.model):
        inputs, outputs = model.language_model.get_input_embeddings(), model.language_model.get_output_embeddings()
        inputs.requires_grad_(outputs.weight is not inputs.weight)
    if hasattr(model, "value_head"):
        inputs, outputs = model.language_model.get_input_embeddings(), model.language_model.get_output_embeddings()
        if getattr(outputs, "weight", None) is not getattr(inputs, "weight", None):  # a pipeline stage may lack one
            outputs.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "nothing is left to train: the flags train only "
            f"{', '.join(sorted(parts))}, and this model has no separate parameters there: train another part"
        )


def _leave_last_layers(part: nn.Module, count: int) -> None:
    from llava_ds.engine.activation_checkpointing import repeated_layers

    part.requires_grad_(False)
    for layer in repeated_layers(part)[-count:]:
        layer.requires_grad_(True)


def parameter_groups(model: LlavaModel, args: Arguments, optimizer: dict | None = None) -> list[dict]:
    """Make the optimizer's parameter groups: for each part, one with and one without weight decay.

    Parts are the language model with newline and value head, the projector, the tower and the modules of extensions.
    Each part has its own rate. Groups of the child models follow, all of a child model's at its rate.
    Biases and norms do not decay. Empty groups are left out. optimizer: the resolved JSON's block.
    Source: LLaVA's LLaVATrainer.create_optimizer.
    """
    training = args.training
    groups = []
    for name, parts, lr in (
        ("language_model", ["language_model", "newline", "value_head"], None),
        ("projector", ["projector"], training.mm_projector_lr),
        ("vision_tower", ["vision_tower"], training.mm_vision_tower_lr),
        *((part, [part], rate) for part, rate in _module_rates(model, args).items()),
    ):
        named = [item for child, part in model.named_children() if child in parts for item in part.named_parameters()]
        trained = [(key, p) for key, p in named if p.requires_grad]
        for suffix, decay, params in (
            ("", training.weight_decay, [p for key, p in trained if _decays(key, p)]),
            ("_no_decay", 0.0, [p for key, p in trained if not _decays(key, p)]),
        ):
            if params:
                rate = training.learning_rate if lr is None else lr
                groups.append({"name": name + suffix, "params": params, "lr": rate, "weight_decay": decay})
    if optimizer is not None and optimizer_name(optimizer) == "Muon":
        groups = _muon_groups(model, groups, optimizer["params"], _own_rates(model, args))
    for wrap in active(args.own, model.language_model.config).wraps:
        groups = wrap.groups(groups)
    for name, child in all_models(model).items():
        if child is not model:
            rate = training.learning_rate if child.learning_rate is None else child.learning_rate
            own = parameter_groups(child, args, optimizer)
            groups += [{**group, "name": f"{name}_{group['name']}", "lr": rate} for group in own]
    return groups


def _module_rates(model: LlavaModel, args: Arguments) -> dict[str, float | None]:
    """Return the rates of extensions' modules, by part."""
    parts = [name for name, _ in model.named_children() if name.startswith(OWN)]
    return {part: args.own[part.removeprefix(OWN)].module_rate for part in parts}


def _own_rates(model: LlavaModel, args: Arguments) -> tuple[str, ...]:
    """Return the name prefixes of groups for which the user gave a rate."""
    given = {"projector": args.training.mm_projector_lr, "vision_tower": args.training.mm_vision_tower_lr}
    given |= _module_rates(model, args)
    return tuple(name for name, rate in given.items() if rate is not None)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """True if weight decay applies. Biases and norms do not decay; the newline and CLIP's class token do, although they
    are vectors, as in LLaVA."""
    return _ndim(parameter) > 1 or name.endswith("embedding")


def _muon_groups(model: LlavaModel, groups: list[dict], params: dict, own_rates: tuple[str, ...]) -> list[dict]:
    """Split each group into hidden matrices, for Muon at muon_lr, and other parameters, for Adam at adam_lr.

    DeepSpeed makes the same split, but lets a group's rate override muon_lr and adam_lr. own_rates: name prefixes of
    the groups that keep their own rate.
    Source: Muon (Jordan 2024): embeddings, output layer, value head, norms and biases stay with Adam.
    """
    llm = model.language_model
    ends = [end for end in (llm.get_input_embeddings(), llm.get_output_embeddings()) if end is not None]
    if hasattr(model, "value_head"):
        ends.append(model.value_head)
    adams = {id(p) for end in ends for p in end.parameters()}
    split = []
    for group in groups:
        own_rate = group["name"].startswith(own_rates)
        for key, of_muon in (("muon_lr", True), ("adam_lr", False)):
            half = [p for p in group["params"] if (_ndim(p) > 1 and id(p) not in adams) == of_muon]
            if half:
                lr = group["lr"] if own_rate else params.get(key, group["lr"])
                split.append({**group, "params": half, "lr": lr})
    return split


def describe_parts(model: LlavaModel, groups: list[dict]) -> list[str]:
    """Return the lines of a table: each part's parameters, its trained parameters, and its learning rate."""
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    lines = [f"  {'part':16}{'parameters':>16}{'trained':>16}   learning rate"]
    for name, part in model.named_children():
        parameters = list(part.parameters())
        trained = [p for p in parameters if id(p) in rates]
        rate = " and ".join(f"{rate:g}" for rate in sorted({rates[id(p)] for p in trained})) or "frozen"
        sizes = (f"{sum(map(num_elements, some)):>16,}" for some in (parameters, trained))
        lines.append(f"  {name:16}{''.join(sizes)}   {rate}")
    return lines


def _ndim(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 the tensor itself is empty


def num_elements(parameter: nn.Parameter) -> int:
    """Return the number of elements of the whole parameter, also if it is packed or sharded."""
    if is_packed(parameter):
        return num_packed(parameter)
    return getattr(parameter, "ds_numel", parameter.numel())
