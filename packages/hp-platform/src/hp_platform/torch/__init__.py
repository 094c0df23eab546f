"""hp-platform on PyTorch; neutral code reaches it through `hp_platform.port`."""
