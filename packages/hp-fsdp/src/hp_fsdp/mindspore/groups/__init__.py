"""Groups on MindSpore: buckets, parameters, gradients."""
