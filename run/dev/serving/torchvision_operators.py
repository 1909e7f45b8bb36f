# pip's torchvision (0.28) is built for CUDA and can't load its operators with a CPU build of torch. "import
# torchvision" then fails while describing two of them. Nothing calls them: processors only import torchvision's names.
# With a CPU build of torchvision this does nothing.
if not _has_ops():  # noqa: F821
    _operators = torch.library.Library("torchvision", "DEF")  # noqa: F821
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
