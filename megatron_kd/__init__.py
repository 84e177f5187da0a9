# SPDX-License-Identifier: Apache-2.0
"""Distillation on Megatron-Bridge: an offline top-K teacher cache and a fused, tensor-parallel divergence."""

__version__ = "0.1.0"
