"""The peak that MFU is of: the vendor's figure by a GPU's exact name, or what a product reaches."""

import pytest
import torch

from llava_ds.tracking.peak import TERA, gemm_peak, peak_flops, vendor_peak

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla V100-SXM2-32GB", 125),
    ],
)
def test_a_gpu_has_its_vendors_dense_figure(name, tera):
    assert vendor_peak(name, BF16) == tera * TERA


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA L400", "NVIDIA H205", "NVIDIA GeForce RTX 4090 Laptop GPU", "X"]
)
def test_a_gpu_of_a_similar_name_has_none(name):
    assert vendor_peak(name, BF16) is None


def test_fp32_has_the_figure_of_tf32_where_it_is_on():
    assert vendor_peak("NVIDIA H200", torch.float32, tf32=True) == 494.7 * TERA
    assert vendor_peak("NVIDIA H200", torch.float32) is None
    assert vendor_peak("Tesla V100-SXM2-32GB", torch.float32, tf32=True) is None


def test_a_cpu_is_measured_and_the_line_says_so():
    found, line = peak_flops(torch.device("cpu"), torch.float32)
    assert 1e8 < found < 1e14 and "a matrix product's speed on this CPU in float32" in line
    assert gemm_peak(torch.device("cpu"), torch.float32, time_s=0.0) > 0
