"""Weights on their way from the training ranks into an engine, whichever it is: no Ray, no Megatron, no vLLM."""
