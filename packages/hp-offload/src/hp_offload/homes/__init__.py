"""Homes: parameters that live on the host, and the cache of the device that their blocks visit."""
