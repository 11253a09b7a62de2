"""A model whose layers are in the mesh, as a PyTorch module of this process.

`from_pretrained` returns the stock model of transformers. Embedding and head are here, the layers
are those of the ring that the node of this machine is in; hidden states go there, gradients come
back. Train it as any model: with an optimiser of torch, with transformers' ``Trainer``, or with
the adapters of ``peft`` (prompt tuning, LoRA), which only this process has. See `meshllm help
training`.
"""

from meshllm.remote.layers import RemoteLayers
from meshllm.remote.pretrained import from_pretrained, remote_layers

__all__ = ["RemoteLayers", "from_pretrained", "remote_layers"]
