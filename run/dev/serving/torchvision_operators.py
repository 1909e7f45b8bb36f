# torchvision as pip has it (0.28) is built for CUDA, and beside a torch for the CPU it can't load its operators. Then
# "import torchvision" fails for two that it wants to describe. Nobody calls them: processors only import its names.
# With a torchvision for the CPU this does nothing.
if not _has_ops():  # noqa: F821
    _operators = torch.library.Library("torchvision", "DEF")  # noqa: F821
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
