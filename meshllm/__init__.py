"""Run one language model on several machines at once.

The interfaces are the command `meshllm` and its HTTP API: from Python, use `meshllm serve` with any
client of OpenAI's API, or `meshllm chat --json`. `meshllm.remote` has the model as a PyTorch
module, with hidden states and gradients. Other modules may change in any release, except what a
transport plugin needs: `meshllm.transport`, `meshllm.errors`, `meshllm.names` and
`meshllm.testing`.
"""

__version__ = "0.1.0"
