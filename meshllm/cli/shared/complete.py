"""Shell completion of option values; imports no torch, to stay fast."""

from pathlib import Path


def models(incomplete: str) -> list[str]:
    """Complete the builtin model and those in the Hugging Face cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = sorted(Path(HF_HUB_CACHE).glob("models--*"))
    names = ["builtin", *(folder.name[8:].replace("--", "/") for folder in folders)]
    return [name for name in names if name.startswith(incomplete)]


def transports(incomplete: str) -> list[str]:
    """Complete the installed transports."""
    from meshllm.transport.registry import Registry

    return [name for name in Registry.discover().names() if name.startswith(incomplete)]


def devices(incomplete: str) -> list[str]:
    """Complete kinds of devices, without checking which exist."""
    return [name for name in ("auto", "cpu", "cuda") if name.startswith(incomplete)]


def setting_names(incomplete: str) -> list[str]:
    """Complete the names of settings."""
    from meshllm.config import keys

    return [name for name in keys() if name.startswith(incomplete)]
