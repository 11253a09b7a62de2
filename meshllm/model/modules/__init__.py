"""Replacements of stock modules: row-invariant, packed, quantised or fused."""

__all__ = [
    "exchange",
    "int8",
    "kernel_choice",
    "linear_bf16",
    "linear_onednn",
    "linear_padded",
    "quant_kernels",
    "quant_linear",
    "quant_store",
    "rms_norm",
]
