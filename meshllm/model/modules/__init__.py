"""Replacements of stock modules: row-invariant, packed, quantised or fused."""

__all__ = [
    "kernel_choice",
    "linear_bf16",
    "linear_onednn",
    "linear_padded",
    "quant_kernels",
    "quant_linear",
    "quant_matrix",
    "quant_store",
    "replacement",
    "rms_norm",
]
