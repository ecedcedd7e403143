"""Other libraries' functions on top of replaylens: TorchLens's here, PyTorch Inspector's in `compat.inspector`."""

from .torchlens import (
    ModelHistory as ModelHistory,
    get_model_activations as get_model_activations,
    get_model_metadata as get_model_metadata,
    get_model_structure as get_model_structure,
    log_forward_pass as log_forward_pass,
    show_model_graph as show_model_graph,
    validate_model_activations as validate_model_activations,
    validate_saved_activations as validate_saved_activations,
    visualize as visualize,
)
