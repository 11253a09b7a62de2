"""Training through frozen layers: a batch forward, its gradients backward, with LoRA adapters."""

__all__ = ["batch", "frozen_span", "lora", "merge"]
