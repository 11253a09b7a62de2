"""Kernels, compiled for this machine's CPU (LLVM) or GPU (Triton)."""

__all__ = [
    "attention",
    "elementwise",
    "flash_attention",
    "gemm_bf16",
    "gemm_int4",
    "gemm_int8",
    "ir",
    "jit",
    "measured",
    "program",
    "rms_norm",
    "softmax",
    "triton_attention",
]
