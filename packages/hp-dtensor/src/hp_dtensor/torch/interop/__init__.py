"""Libraries of torch that see DTensors."""
