"""Kernels, compiled for this machine's CPU (LLVM) or GPU (Triton)."""
