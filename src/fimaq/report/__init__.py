"""Pictures and figures about a model and its quantization."""
