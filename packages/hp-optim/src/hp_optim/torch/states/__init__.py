"""Memory of optimizer states: blocks, eight-bit codes, states on the host, states that are loaded."""
