"""Tables of TOML as sections, values from the command line, and what is wrong with them."""
