"""Ways of tokens to their experts and back."""
