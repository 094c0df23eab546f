"""hp-platform on MindSpore; neutral code reaches it through `hp_platform.port`."""
