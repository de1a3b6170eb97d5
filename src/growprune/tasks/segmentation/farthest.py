# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, allow-incomplete-defs
# Triton has no types, and the arguments of a kernel are not Python objects
"""Finds farthest points on CUDA in one kernel, with one program per cloud. It needs Triton and a GPU.

A cloud of 2,048 points fits into the registers of one program. So a step costs one reduction, not eight launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def farthest_points(xyz: Tensor, num_samples: int) -> Tensor:
    num_clouds, num_points, _ = xyz.shape
    chosen = torch.empty(num_clouds, num_samples, dtype=torch.long, device=xyz.device)
    sizes = {"BLOCK": triton.next_power_of_2(num_points), "num_warps": 8 if num_points > 1024 else 4}
    with torch.cuda.device(xyz.device):
        # without fused multiply-adds, distances equal those of torch, and so does the choice between nearly equal ones
        _kernel[(num_clouds,)](xyz.contiguous(), chosen, num_points, num_samples, enable_fp_fusion=False, **sizes)
    return chosen


@triton.jit
def _kernel(xyz, chosen, num_points, num_samples, BLOCK: tl.constexpr):
    cloud = tl.program_id(0)
    points = xyz + cloud * num_points * 3
    places = chosen + cloud * num_samples
    index = tl.arange(0, BLOCK)
    exists = index < num_points
    x = tl.load(points + index * 3, mask=exists, other=0.0)
    y = tl.load(points + index * 3 + 1, mask=exists, other=0.0)
    z = tl.load(points + index * 3 + 2, mask=exists, other=0.0)
    nearest = tl.where(exists, float("inf"), -1.0)  # padding is never the farthest
    last = 0
    for step in range(num_samples):
        tl.store(places + step, last)
        dx = x - tl.load(points + last * 3)
        dy = y - tl.load(points + last * 3 + 1)
        dz = z - tl.load(points + last * 3 + 2)
        nearest = tl.minimum(nearest, dx * dx + dy * dy + dz * dz)
        last = tl.argmax(nearest, 0)
