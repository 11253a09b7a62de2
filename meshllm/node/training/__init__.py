"""Training through the layers of the mesh: batches computed here, or sent to the node that can."""

from meshllm.node.training.relay import TrainingRelay
from meshllm.node.training.server import FrozenModel, LayerPass, TrainingServer

__all__ = ["FrozenModel", "LayerPass", "TrainingRelay", "TrainingServer"]
